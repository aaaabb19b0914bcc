"""What an LDS is made of: groups of queries apart, and what is left without another method's part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from stride_cli.research.evaluation.metrics import mid_ranks, row_pearson

if TYPE_CHECKING:
    from stride_cli.research.evaluation.records import GroupMean

_MOST_GROUPS = 12


def query_groups(names: Sequence[str]) -> dict[str, np.ndarray]:
    """Queries by the part of their name before the first ``/``: group → (q,) int64.

    Empty where names have no such part, or there is only one group, or more than a dozen.
    """
    if not all("/" in name for name in names):
        return {}
    prefixes = np.array([name.partition("/")[0] for name in names])
    found = {str(prefix): np.flatnonzero(prefixes == prefix) for prefix in dict.fromkeys(prefixes.tolist())}
    return found if 1 < len(found) <= _MOST_GROUPS else {}


def mean_over_queries(values: np.ndarray) -> GroupMean:
    """{queries, mean, se} of a correlation per query, (q,); the error is over queries only."""
    n = len(values)
    return {
        "queries": n,
        "mean": float(np.mean(values)) if n else None,
        "se": float(np.std(values, ddof=1) / np.sqrt(n)) if n > 1 else None,
    }


def partial_spearman(predicted: np.ndarray, measured: np.ndarray, given: np.ndarray) -> np.ndarray:
    """Rank correlation of prediction and measurement with a third variable's part removed from both.

        (r_pm − r_pg r_mg) / √((1 − r_pg²) (1 − r_mg²)),     r: Spearman's correlation over the subsets

    Parameters
    ----------
    predicted, measured, given : (Q, R)

    Returns
    -------
    ndarray (Q,) float64; 0 where either side is a function of the third's ranks
    """
    p, m, g = (mid_ranks(side) for side in (predicted, measured, given))
    r_pm, r_pg, r_mg = row_pearson(p, m), row_pearson(p, g), row_pearson(m, g)
    scale = np.sqrt(np.clip(1 - r_pg**2, 0, None) * np.clip(1 - r_mg**2, 0, None))
    return np.where(scale > 1e-6, (r_pm - r_pg * r_mg) / np.where(scale > 1e-6, scale, 1), 0.0)
