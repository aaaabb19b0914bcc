"""Candidate selection: the chunks whose exact gradients are worth taking, after the Lasso of a query."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from stride_cli.recovery.problem import Solution
from stride_cli.recovery.screening import Design

_OPPOSING = 0.3  # a chunk that opposes has to be so much stronger: most that seem to are noise
_ROWS = 1 << 18  # chunks that are looked at together: what is held of all n would be larger than the design
_FREE = 0.3  # least share of a design's degrees of freedom that is taken to be left beside the support

# a range of chunks, or given ones ascending → a number for each, float64
Strength = Callable[[slice | np.ndarray], np.ndarray]


class Candidates(NamedTuple):
    """Chunks to take exact gradients of.

    Attributes
    ----------
    chunks : (t,) int64, ascending
    margins : (guides, t) float64      how much lower a chunk's strength could be for that guide to choose it
                                       all the same; ∞ where all are chosen
    others : float                     what the Lasso's weights of other chunks are to be multiplied by, 0 … 1
    """

    chunks: np.ndarray
    margins: np.ndarray
    others: float


class Debiased:
    """The debiased Lasso, part by part; a `Strength`.

        ŵ = w + Mᵀ r / ((d − d²/K) (1 − nnz/K))

    (Javanmard and Montanari, IEEE Trans. Inf. Theory 60, 2014; the factor is that of approximate message
    passing. The error is that of d independent residuals.)

    Parameters
    ----------
    columns : (n, d)           the design
    solution : Solution        of one query

    Attributes
    ----------
    noise : float      the standard deviation of its error
    """

    def __init__(self, columns: Any, solution: Solution) -> None:
        self._solution = solution
        self._design = Design(columns, len(solution.residual))
        degree, n_subsets = self._design.degree, self._design.n_subsets
        self._scale = max(degree - degree**2 / n_subsets, 0.5)
        self._share = 1.0 / max(_FREE, 1.0 - len(solution.indices) / n_subsets)
        self.noise = float(np.sqrt(solution.residual.var() * degree / self._scale**2)) * self._share

    def __call__(self, rows: slice | np.ndarray) -> np.ndarray:
        known, residual = self._solution.indices, self._solution.residual
        if isinstance(rows, slice):
            found = self._design.correlate(residual, rows.start, rows.stop) / self._scale
            first, last = np.searchsorted(known, [rows.start, rows.stop])
            places, weighted = known[first:last] - rows.start, np.arange(first, last)
        else:
            found = residual[self._design.rows(rows)].sum(axis=1) / self._scale
            _, places, weighted = np.intersect1d(rows, known, assume_unique=True, return_indices=True)
        found *= self._share
        found[places] += self._solution.values[weighted]
        return found


def candidates(
    columns: Any,
    solution: Solution,
    count: int,
    second: Strength | None = None,
    alone: Strength | None = None,
) -> Candidates:
    """Choose the chunks whose influence is most likely to be large.

    Where subsets are few the Lasso can give only K chunks a weight; what it leaves unexplained ranks the
    others (`Debiased`). A second estimate counts in units of its own noise: nearly all of its spread is. Then
    what the Lasso says of other chunks counts as far as it can be trusted: by the share of the debiased
    estimate's variance over chunks that is not its error's. Memory does not grow with n.

    Parameters
    ----------
    columns : (n, d)                    the design
    solution : Solution                 of one query
    count : int
    second : Strength, optional         at variance 1 over the chunks
    alone : Strength, optional          guides half of the choice by itself, before both together do

    Returns
    -------
    Candidates      min(count, n) chunks
    """
    estimate = Debiased(columns, solution)
    n_chunks, unit = solution.n_chunks, max(estimate.noise, np.finfo(float).tiny)
    guides = 1 if alone is None else 2
    everything = count >= n_chunks
    if everything and second is None:
        return Candidates(np.arange(n_chunks), np.full((guides, n_chunks), np.inf), 1.0)
    shares = [count * (number + 1) // guides - count * number // guides for number in range(guides)]
    # 1. Part by part, the strongest by each guide. A guide's next best too, for the margins; and the last
    # one's may be taken by the first
    best = [_Best(1 + sum(shares[: number + 1])) for number in range(guides)]
    moments = _Moments()
    for start, stop in _parts_of(n_chunks):
        part = slice(start, stop)
        own = estimate(part)
        if second is not None:
            moments.add(own)
            if everything:
                continue
            own = own / unit + second(part)
        if alone is not None:
            best[0].add(start, _strength(alone(part)))
        best[-1].add(start, _strength(own))
    others = 1.0 if second is None else moments.share_of_signal(estimate.noise)
    if everything:
        return Candidates(np.arange(n_chunks), np.full((guides, n_chunks), np.inf), others)
    # 2. Each guide's share of what is left by those before it, and the strength of the first that is left out
    taken, cuts = np.empty(0, np.int64), []
    for own_best, share in zip(best, shares, strict=True):
        left = ~np.isin(own_best.chunks, taken)
        taken = np.concatenate([taken, own_best.chunks[left][:share]])
        cuts.append(own_best.strengths[left][share])
    # 3. How far above that each chunk is
    chunks = np.sort(taken)
    values = estimate(chunks)
    if second is not None:
        values = values / unit + second(chunks)
    by_guide = [values] if alone is None else [alone(chunks), values]
    margins = np.stack([strength - cut for strength, cut in zip(by_guide, cuts, strict=True)])
    return Candidates(chunks, margins, others)


def _parts_of(n_chunks: int) -> Iterator[tuple[int, int]]:
    for start in range(0, n_chunks, _ROWS):
        yield start, min(start + _ROWS, n_chunks)


def _strength(guide: np.ndarray) -> np.ndarray:
    return np.maximum(guide, -_OPPOSING * guide)


@dataclass
class _Moments:
    """Mean and variance of numbers that come part by part (Chan, Golub and LeVeque, 1979)."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def add(self, values: np.ndarray) -> None:
        count, mean = len(values), float(values.mean())
        total, apart = self.count + count, mean - self.mean
        self.squares += float(values.var()) * count + apart**2 * self.count * count / total
        self.mean += apart * count / total
        self.count = total

    def share_of_signal(self, noise: float) -> float:
        """The share of the variance that is not noise's, 0 … 1."""
        variance = self.squares / max(1, self.count)
        return max(0.0, 1.0 - noise**2 / variance) if variance > 0 else 0.0


@dataclass
class _Best:
    """The `size` strongest chunks of those that were seen, strongest first, of equal ones the earlier."""

    size: int
    chunks: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    strengths: np.ndarray = field(default_factory=lambda: np.empty(0))

    def add(self, start: int, strengths: np.ndarray) -> None:
        """Chunks from `start` on, after all that were seen."""
        if len(self.chunks) == self.size:  # most parts have few that are as strong
            found = np.flatnonzero(strengths > self.strengths[-1])
        else:
            found = np.arange(len(strengths))
        if len(found) > self.size:
            least = np.partition(strengths[found], len(found) - self.size)[len(found) - self.size]
            found = found[strengths[found] >= least]
        strengths = np.concatenate([self.strengths, strengths[found]])
        chunks = np.concatenate([self.chunks, start + found])
        order = np.argsort(-strengths, kind="stable")[: self.size]
        self.chunks, self.strengths = chunks[order], strengths[order]


def with_weights(
    solution: Solution, chunks: np.ndarray, values: np.ndarray, *, others: float = 1.0
) -> Solution:
    """The solution with these weights at these chunks, and the other weights times `others`; all else, the
    residual too, is still the Lasso's."""
    indices = np.union1d(solution.indices, chunks)
    weights = np.zeros(len(indices))
    weights[np.searchsorted(indices, solution.indices)] = others * solution.values
    weights[np.searchsorted(indices, chunks)] = values
    left = weights != 0.0
    return replace(solution, indices=indices[left], values=weights[left])
