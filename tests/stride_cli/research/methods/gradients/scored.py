"""Calls that the tests of methods share."""

from __future__ import annotations

from typing import Any

import numpy as np


def score_all(method: Any, queries: Any) -> np.ndarray:
    """Concatenate all blocks of `Method.score`: (Q, n) float32."""
    return np.concatenate(list(method.score(queries)) or [np.zeros((0, 0), np.float32)])


def scored(method: Any, task: Any, queries: Any) -> np.ndarray:
    """Fit a method, then score every chunk for every query: (Q, n) float32."""
    method.fit(task)
    return score_all(method, queries)
