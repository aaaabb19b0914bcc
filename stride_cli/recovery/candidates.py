"""Candidate selection: the chunks whose exact gradients are worth taking, by a solution without them."""

from __future__ import annotations

from typing import Any

import numpy as np

from stride_cli.recovery.problem import Solution
from stride_cli.recovery.screening import Design

_OPPOSING = 0.3  # a chunk that opposes has to be so much stronger: most that seem to are noise


def likeliest(columns: Any, solution: Solution, count: int) -> np.ndarray:
    """Choose the chunks whose influence is most likely to be large.

    Where most chunks have no weight, weights are debiased: what the penalty keeps back is added, and chunks
    without a weight have that alone.

        ŵ_i = w_i + m_i · r / (d − d²/K)

    (Javanmard and Montanari, IEEE Trans. Inf. Theory 60, 2014.)

    Parameters
    ----------
    columns : (n, d)         the design
    solution : Solution      without exact values
    count : int

    Returns
    -------
    ndarray (min(count, n),) int64, ascending
    """
    design = Design(columns, len(solution.residual))
    degree, residual = design.degree, solution.residual
    if count >= design.n_chunks:
        return np.arange(design.n_chunks)
    chunks, strength = solution.indices, solution.values
    if len(chunks) < design.n_chunks:
        # 1. Of chunks without a weight, those that the residual calls for most. A chunk that opposes counts
        # less, so that more are looked at
        wanted = int(np.ceil(count / _OPPOSING))
        floor = design.floor_for(design.sample_scores(residual, signed=False), wanted)
        found = design.scan(residual, floor, signed=False, capacity=2 * wanted)
        others = found.ids[~np.isin(found.ids, chunks)]
        chunks = np.concatenate([chunks, others])
        called = residual[design.rows(chunks)].sum(axis=1) / max(degree - degree**2 / design.n_subsets, 0.5)
        strength = np.concatenate([strength, np.full(len(others), solution.average)]) + called
    # 2. The strongest
    strength = np.maximum(strength, -_OPPOSING * strength)
    if len(chunks) < count:  # all scores are the same, or nothing is left to explain: any chunks will do
        missing = np.setdiff1d(np.arange(min(design.n_chunks, 2 * count + len(chunks))), chunks)
        chunks = np.concatenate([chunks, missing])
        strength = np.concatenate([strength, np.full(len(missing), -np.inf)])
    return np.sort(chunks[np.argsort(-strength, kind="stable")[:count]])
