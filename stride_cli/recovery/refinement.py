"""Recover, then refine: which chunks are worth a direct look after the recovery, and the weights with what it
showed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from stride_cli.recovery.lasso import correlate
from stride_cli.recovery.problem import Solution

_OPPOSING = 0.3  # a chunk that opposes has to be so much stronger: most that seem to are noise
_FREE = 0.3  # least share of a design's degrees of freedom that is taken to be left beside the support


@dataclass(frozen=True)
class Chosen:
    """Chunks worth a direct look.

    Attributes
    ----------
    chunks : (t,) int64, ascending
    margins : (guides, t) float64      how much lower a chunk's strength could be for that guide to choose it
                                       all the same; ∞ where all are chosen
    others : float                     what the weights of other chunks are to be multiplied by, 0 … 1; 1
                                       without a second estimate
    """

    chunks: np.ndarray
    margins: np.ndarray
    others: float


def candidates(
    columns: Sequence[Any],
    solution: Solution,
    count: int,
    second: np.ndarray | None = None,
    alone: np.ndarray | None = None,
) -> Chosen:
    """The chunks whose influence is most likely to be large, by the debiased Lasso and a second estimate.

    Where subsets are few the Lasso can give only K chunks a weight; what it leaves unexplained ranks the
    others. Of two estimates each is taken in units of its own noise: nearly all of the second's spread is.
    Then the recovery is not all there is, and what it says of other chunks counts as far as it can be
    trusted: by the share of the debiased estimate's variance over chunks that is not its error's.

    Parameters
    ----------
    columns : C designs (n, d), of all models that measured
    solution : Solution                of one query, residual (C K,)
    count : int
    second : (n,) float64, optional    `stride_cli.attribution.direct_readout.second_estimates`
    alone : (n,) float64, optional     what guides half of the choice by itself, before the others do

    Returns
    -------
    Chosen      min(count, n) chunks
    """
    estimate, noise = debiased(columns, solution)
    others = 1.0
    if second is not None:
        others = _share_of_signal(estimate, noise)
        estimate = estimate / max(noise, np.finfo(float).tiny) + second
    guides = [estimate] if alone is None else [alone, estimate]
    n_chunks = len(estimate)
    if count >= n_chunks:
        everything = np.full((len(guides), n_chunks), np.inf)
        return Chosen(np.arange(n_chunks), everything, others)
    left = np.ones(n_chunks, bool)
    cuts = []
    for number, guide in enumerate(guides):
        strength = np.where(guide > 0.0, guide, -_OPPOSING * guide)
        strength[~left] = -np.inf
        share = count * (number + 1) // len(guides) - count * number // len(guides)
        order = np.argpartition(-strength, share)
        left[order[:share]] = False
        cuts.append(strength[order[share]])
    chunks = np.flatnonzero(~left)
    margins = np.stack([guide[chunks] - cut for guide, cut in zip(guides, cuts, strict=True)])
    return Chosen(chunks, margins, others)


def trust(columns: Sequence[Any], solution: Solution) -> float:
    """How far a recovery can be trusted, 0 … 1: the share of the debiased estimate's variance over chunks
    that is not its error's. Parameters as for `candidates`."""
    return _share_of_signal(*debiased(columns, solution))


def _share_of_signal(estimate: np.ndarray, noise: float) -> float:
    variance = float(estimate.var())
    return max(0.0, 1.0 - noise**2 / variance) if variance > 0 else 0.0


def debiased(columns: Sequence[Any], solution: Solution) -> tuple[np.ndarray, float]:
    """The debiased Lasso, and the standard deviation of its error.

        ŵ = w + Mᵀ r / ((d − d²/K) (1 − nnz/K))

    (Javanmard and Montanari, IEEE Trans. Inf. Theory 60, 2014; the factor is that of approximate message
    passing. The error is that of d independent residuals.) Of C models the mean.

    Returns
    -------
    estimate : (n,) float64
    noise : float
    """
    estimate = np.zeros(solution.n_chunks)
    variance = 0.0
    for own, residual in zip(columns, np.split(solution.residual, len(columns)), strict=True):
        degree, n_subsets = int(own.shape[1]), len(residual)
        scale = max(degree - degree**2 / n_subsets, 0.5)
        estimate += correlate(own, residual) / scale
        variance += residual.var() * degree / scale**2
    free = max(_FREE, 1.0 - len(solution.indices) / len(solution.residual))
    share = 1.0 / (len(columns) * free)
    estimate *= share
    estimate[solution.indices] += solution.values
    return estimate, float(np.sqrt(variance)) * share


def with_weights(
    solution: Solution, chunks: np.ndarray, values: np.ndarray, *, others: float = 1.0
) -> Solution:
    """The solution with these weights at these chunks, and the other weights times `others`; all else, the
    residual too, is still the Lasso's."""
    weights = np.zeros(solution.n_chunks)
    weights[solution.indices] = others * solution.values
    weights[chunks] = values
    indices = np.flatnonzero(weights)
    return replace(solution, indices=indices, values=weights[indices])
