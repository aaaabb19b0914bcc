"""How unusual an item is among controls: p-values by rank, and q-values over a benchmark."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def p_values(statistics: np.ndarray, controls: np.ndarray) -> np.ndarray:
    """One-sided p-value of each statistic among those of controls, large values being unusual.

        p = (1 + #{controls above} + ½ #{controls equal}) / (1 + m)

    The item counts as one of its own controls (the +1 of Davison and Hinkley 1997, section 4.2), so that p is
    never 0; equal values share their mid-rank. Uniform on {1, …, m + 1} / (m + 1) where the item and the
    controls are exchangeable and no two values are equal.

    Parameters
    ----------
    statistics : (N,)      controls : (m,)

    Returns
    -------
    (N,) float64
    """
    ordered = np.sort(np.asarray(controls, np.float64))
    values = np.asarray(statistics, np.float64)
    above = len(ordered) - np.searchsorted(ordered, values, side="right")
    equal = len(ordered) - np.searchsorted(ordered, values, side="left") - above
    return (1 + above + 0.5 * equal) / (1 + len(ordered))


def combined_p_values(
    statistics: np.ndarray, controls: np.ndarray, *, zero_is_nothing: Sequence[bool]
) -> np.ndarray:
    """One p-value of each item from several statistics at once.

    Within the item and the m controls every statistic is replaced by its rank from the top, r / (m + 1); the
    combination is Fisher's, T = −Σ log(r / (m + 1)). No independence is assumed: T itself is ranked among the
    T of the controls, which are computed from the same pool, so that p is exact where item and controls are
    exchangeable.

    Parameters
    ----------
    statistics : (N, S)      controls : (m, S)
    zero_is_nothing : (S,) bool
        Where a value of this statistic that is not above zero says nothing: its rank is the last, whatever
        share of the controls it ties with.

    Returns
    -------
    (N,) float64
    """
    statistics = np.asarray(statistics, np.float64)
    controls = np.asarray(controls, np.float64)
    m = len(controls)
    # ranks of the controls among themselves, from the top, ties in the middle
    among = np.stack([p_values(column, column) * (m + 1) - 0.5 for column in controls.T], axis=1)
    found = np.empty(len(statistics))
    for row, item in enumerate(statistics):
        above = item > controls  # (m, S)
        equal = item == controls
        ranks = (among + above + 0.5 * equal) / (m + 1)
        own = 1 - (above.sum(axis=0) + 0.5 * equal.sum(axis=0)) / (m + 1)
        for column, nothing in enumerate(zero_is_nothing):
            if nothing:
                ranks[controls[:, column] <= 0, column] = 1.0
                if item[column] <= 0:
                    own[column] = 1.0
        # to rounding: equal ranks in another order of addition must stay equal
        total = np.round(-np.log(ranks).sum(axis=1), 12)
        found[row] = p_values(np.round(-np.log(own).sum(keepdims=True), 12), total)[0]
    return found


def benjamini_hochberg(p: np.ndarray) -> np.ndarray:
    """q-values: the false-discovery rate at which each would just be reported (Benjamini and Hochberg 1995).

    q_(i) = min over j ≥ i of p_(j) N / j, at most 1; (N,) float64.
    """
    p = np.asarray(p, np.float64)
    order = np.argsort(p)
    scaled = p[order] * len(p) / np.arange(1, len(p) + 1)
    q = np.empty(len(p))
    q[order] = np.minimum(np.minimum.accumulate(scaled[::-1])[::-1], 1.0)
    return q


def fewest_controls(n_items: int, level: float) -> int:
    """Controls from which on a single unusual item among N can reach q < level: N / level, rounded up."""
    return int(np.ceil(n_items / level))
