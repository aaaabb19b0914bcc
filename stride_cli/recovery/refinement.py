"""Recover, then refine: which chunks are worth a direct look after the recovery, and the weights with what it
showed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from stride_cli.recovery.lasso import correlate
from stride_cli.recovery.problem import Solution

_OPPOSING = 0.3  # a chunk that opposes has to be so much stronger: most that seem to are noise
_FREE = 0.3  # least share of a design's degrees of freedom that is taken to be left beside the support


def candidates(
    columns: Sequence[Any], solution: Solution, count: int, sketched: np.ndarray | None = None
) -> np.ndarray:
    """The chunks whose influence is most likely to be large, by the debiased Lasso and by sketches.

        ŵ = w + Mᵀ r / ((d − d²/K) (1 − nnz/K))

    Where subsets are few the Lasso can give only K chunks a weight; what it leaves unexplained ranks the
    others (Javanmard and Montanari, IEEE Trans. Inf. Theory 60, 2014; the factor is that of approximate
    message passing). Each of ŵ and the sketches' estimate counts by the inverse of its error's variance: of ŵ
    by the residual's, of a sketch by that of the influences themselves, most of which it does not see.

    Parameters
    ----------
    columns : C designs (n, d), of all models that measured
    solution : Solution                  of one query, residual (C K,)
    count : int
    sketched : (n,) float64, optional    a second estimate of w

    Returns
    -------
    ndarray (min(count, n),) int64, ascending
    """
    estimate = np.zeros(solution.n_chunks)
    noise = 0.0
    for own, residual in zip(columns, np.split(solution.residual, len(columns)), strict=True):
        degree, n_subsets = int(own.shape[1]), len(residual)
        scale = max(degree - degree**2 / n_subsets, 0.5)
        estimate += correlate(own, residual) / scale
        noise += residual.var() * degree / scale**2
    free = max(_FREE, 1.0 - len(solution.indices) / len(solution.residual))
    estimate /= len(columns) * free
    estimate[solution.indices] += solution.values
    if sketched is not None:
        noise /= (len(columns) * free) ** 2
        power = _power(columns, solution)
        estimate = estimate * power + np.asarray(sketched) * noise
    strength = np.where(estimate > 0.0, estimate, -_OPPOSING * estimate)
    count = min(count, len(strength))
    return np.sort(np.argpartition(-strength, count - 1)[:count]) if count else np.zeros(0, np.int64)


def _power(columns: Sequence[Any], solution: Solution) -> float:
    """Variance of the influences over chunks, by that of their sums over random subsets."""
    found = 0.0
    for own, residual in zip(columns, np.split(solution.residual, len(columns)), strict=True):
        own = np.asarray(own)[solution.indices]
        explained = np.zeros(len(residual))
        for drawn in own.T:
            np.add.at(explained, drawn, solution.values)
        members = solution.n_chunks * own.shape[1] / len(residual)
        found += (residual + explained).var() / max(1.0, members)
    return found / len(columns)


def with_weights(solution: Solution, chunks: np.ndarray, values: np.ndarray) -> Solution:
    """The solution with these weights at these chunks; all else, the residual too, is still the Lasso's."""
    weights = np.zeros(solution.n_chunks)
    weights[solution.indices] = solution.values
    weights[chunks] = values
    indices = np.flatnonzero(weights)
    return replace(solution, indices=indices, values=weights[indices])
