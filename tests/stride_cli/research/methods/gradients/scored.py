"""One call that the tests of gradient methods share."""

from __future__ import annotations

from typing import Any

import numpy as np

from stride_cli.research.methods.protocol import score_all


def scored(method: Any, task: Any, queries: Any) -> np.ndarray:
    """Fit a method, then score every chunk for every query: (Q, n) float32."""
    method.fit(task)
    return score_all(method, queries)
