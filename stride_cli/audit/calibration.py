"""Rank items among controls: p-values, q-values over a benchmark, and what the test can find."""

from __future__ import annotations

import numpy as np


def p_values(statistics: np.ndarray, controls: np.ndarray) -> np.ndarray:
    """Compute the one-sided p-value of each statistic among those of controls; large values are unusual.

        p = (1 + #{controls above} + ½ #{controls equal}) / (1 + m)

    The item counts as one of its own controls (the +1 of Davison and Hinkley 1997, section 4.2), so that p is
    never 0; equal values share their mid-rank. Uniform on {1, …, m + 1} / (m + 1) where the item and the
    controls are exchangeable and no two values are equal.

    Of (N,) and (m,) values: (N,) float64; NaN of a NaN, and controls that are NaN do not count.
    """
    values, controls = np.asarray(statistics, np.float64), np.asarray(controls, np.float64)
    ordered = np.sort(controls[np.isfinite(controls)])
    above = len(ordered) - np.searchsorted(ordered, values, side="right")
    equal = len(ordered) - np.searchsorted(ordered, values, side="left") - above
    return np.where(np.isnan(values), np.nan, (1 + above + 0.5 * equal) / (1 + len(ordered)))


def power(controls: np.ndarray, level: float, shift: float) -> float:
    """Compute the share of controls that have p ≤ level among the others once they are raised by `shift`.

    With few controls it is 0: no p-value is so small.
    """
    ordered = np.sort(np.asarray(controls, np.float64)[np.isfinite(controls)])
    if not len(ordered):
        return 0.0
    # of m controls without the raised one, which leaves m places below it and its own
    at_least = np.searchsorted(ordered, ordered + shift, side="left")
    above = len(ordered) - at_least
    return float(np.mean((1 + above) / len(ordered) <= level))


def benjamini_hochberg(p: np.ndarray) -> np.ndarray:
    """Compute q-values: the false-discovery rate at which each is just reported.

    q_(i) = min over j ≥ i of p_(j) N / j, at most 1; (N,) float64 (Benjamini and Hochberg 1995).
    """
    p = np.asarray(p, np.float64)
    order = np.argsort(p)
    scaled = p[order] * len(p) / np.arange(1, len(p) + 1)
    q = np.empty(len(p))
    q[order] = np.minimum(np.minimum.accumulate(scaled[::-1])[::-1], 1.0)
    return q


def fewest_together(n_items: int, n_controls: int, level: float) -> int:
    """Count the items among N that have to be unusual together for q < level.

    k at the smallest p-value, 1 / (m + 1), have q = N / (k (m + 1)). More than N: with so few controls there
    can be no discovery.
    """
    return int(n_items / (level * (n_controls + 1))) + 1
