"""Rank items among controls: p-values, and q-values over a benchmark."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def p_values(statistics: np.ndarray, controls: np.ndarray) -> np.ndarray:
    """Compute the one-sided p-value of each statistic among those of controls; large values are unusual.

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


def joint_p_values(
    statistics: np.ndarray, controls: np.ndarray, *, zero_is_nothing: Sequence[bool]
) -> tuple[np.ndarray, np.ndarray]:
    """Join statistics that all have to be unusual into one p-value an item: the largest of theirs.

    The hypothesis that is rejected is "at least one of them is as among controls": an intersection-union test
    (Berger 1982), valid whatever the dependence between the statistics. So an item that is merely easy, or a
    copy whose influence is found although the loss is as it would be without it, is no discovery.

    Parameters
    ----------
    statistics : (N, S)      controls : (m, S)
    zero_is_nothing : (S,) bool
        Where a value of this statistic that is not above zero is no evidence: its p-value is 1, whatever
        share of the controls it ties with.

    Returns
    -------
    p : (N,) float64, each : (N, S) float64
    """
    statistics = np.asarray(statistics, np.float64)
    each = np.stack(
        [p_values(ours, theirs) for ours, theirs in zip(statistics.T, np.asarray(controls).T, strict=True)],
        axis=1,
    )
    each[(statistics <= 0) & np.asarray(zero_is_nothing, bool)] = 1.0
    return each.max(axis=1), each


def leave_one_out_p_values(
    statistics: np.ndarray, *, zero_is_nothing: Sequence[bool]
) -> tuple[np.ndarray, np.ndarray]:
    """Compute `joint_p_values` of each item with all others as its controls; none is below 1 / N."""
    count = len(statistics)
    if not count:
        return np.zeros(0), np.zeros(np.shape(statistics))
    statistics = np.asarray(statistics, np.float64)
    _, each = joint_p_values(statistics, statistics, zero_is_nothing=[False] * statistics.shape[1])
    each = (each * (count + 1) - 0.5) / count  # each tied with itself, at half a rank
    each[(statistics <= 0) & np.asarray(zero_is_nothing, bool)] = 1.0
    return each.max(axis=1), each


def grouped_q_values(p: np.ndarray, group: np.ndarray) -> np.ndarray:
    """Compute q-values of each group of items by itself: `benjamini_hochberg` within.

    Items with a copy in the corpus are few, and leaks among them many; put together with the thousands of
    items without one, they would pay for tests that nobody wondered about, and hits among them would buy
    false ones elsewhere (Efron 2008, "Simultaneous inference: when should hypothesis testing problems be
    combined?"). Whether there is a copy is decided without the model, so that it cannot favour small p-values
    of items that had no effect on it.

    Parameters
    ----------
    p : (N,)      group : (N,) labels
    """
    q = np.ones(len(p))
    for label in np.unique(group):
        q[group == label] = benjamini_hochberg(np.asarray(p)[group == label])
    return q


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


def fewest_controls(n_items: int, level: float) -> int:
    """Count the controls with which one unusual item among N can reach q < level: N / level, rounded up."""
    return int(np.ceil(n_items / level))


def fewest_together(n_items: int, n_controls: int, level: float) -> int:
    """Count the items among N that have to be unusual together for q < level.

    k at the smallest p-value, 1 / (m + 1), have q = N / (k (m + 1)). More than N: with so few controls there
    can be no discovery.
    """
    return int(n_items / (level * (n_controls + 1))) + 1
