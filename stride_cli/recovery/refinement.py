"""Recover, then refine: which chunks are worth a direct look after the recovery, and the weights with what it
showed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from stride_cli.recovery.problem import Solution
from stride_cli.recovery.screening import Design

_OPPOSING = 0.3  # a chunk that opposes has to be so much stronger: most that seem to are noise
_ROWS = 1 << 18  # chunks that are looked at together: what is held of all n would be larger than the design
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


class Guide(Protocol):
    """A number for every chunk, (n,) float64: an array, or what computes parts of one."""

    def __getitem__(self, rows: slice | np.ndarray, /) -> np.ndarray: ...


class Debiased:
    """The debiased Lasso, part by part; a `Guide`.

        ŵ = w + Mᵀ r / ((d − d²/K) (1 − nnz/K))

    (Javanmard and Montanari, IEEE Trans. Inf. Theory 60, 2014; the factor is that of approximate message
    passing. The error is that of d independent residuals.) Of C models the mean.

    Parameters
    ----------
    columns : C designs (n, d), of all models that measured
    solution : Solution                of one query, residual (C K,)

    Attributes
    ----------
    noise : float      the standard deviation of its error
    """

    def __init__(self, columns: Sequence[Any], solution: Solution) -> None:
        self._solution = solution
        residuals = np.split(solution.residual, len(columns))
        self._designs = [Design(own, len(residuals[0])) for own in columns]
        free = max(_FREE, 1.0 - len(solution.indices) / len(solution.residual))
        self._share = 1.0 / (len(columns) * free)
        self._parts: list[tuple[Design, np.ndarray, float]] = []
        variance = 0.0
        for design, residual in zip(self._designs, residuals, strict=True):
            scale = max(design.degree - design.degree**2 / design.n_subsets, 0.5)
            self._parts.append((design, residual, scale))
            variance += residual.var() * design.degree / scale**2
        self.noise = float(np.sqrt(variance)) * self._share

    def __len__(self) -> int:
        return self._solution.n_chunks

    def __getitem__(self, rows: slice | np.ndarray, /) -> np.ndarray:
        """Of a range of chunks, or of the given ones (ascending), float64."""
        known = self._solution.indices
        if isinstance(rows, slice):
            start, stop, _ = rows.indices(len(self))
            found = np.zeros(stop - start)
            for design, residual, scale in self._parts:
                found += design.correlate(residual, start, stop) / scale
            first, last = np.searchsorted(known, [start, stop])
            places, weighted = known[first:last] - start, np.arange(first, last)
        else:
            found = np.zeros(len(rows))
            for design, residual, scale in self._parts:
                found += residual[design.rows(rows)].sum(axis=1) / scale
            _, places, weighted = np.intersect1d(rows, known, assume_unique=True, return_indices=True)
        found *= self._share
        found[places] += self._solution.values[weighted]
        return found


def candidates(
    columns: Sequence[Any],
    solution: Solution,
    count: int,
    second: Guide | None = None,
    alone: Guide | None = None,
    *,
    estimate: Debiased | None = None,
) -> Chosen:
    """The chunks whose influence is most likely to be large, by the debiased Lasso and a second estimate.

    Where subsets are few the Lasso can give only K chunks a weight; what it leaves unexplained ranks the
    others. Of two estimates each is taken in units of its own noise: nearly all of the second's spread is.
    Then the recovery is not all there is, and what it says of other chunks counts as far as it can be
    trusted: by the share of the debiased estimate's variance over chunks that is not its error's.

    Chunks are looked at part by part, so that memory does not grow with n.

    Parameters
    ----------
    columns : C designs (n, d), of all models that measured
    solution : Solution                of one query, residual (C K,)
    count : int
    second : (n,) float64, optional    `stride_cli.attribution.direct_readout.second_estimates`
    alone : (n,) float64, optional     what guides half of the choice by itself, before the others do
    estimate : the debiased Lasso, where there is one already

    Returns
    -------
    Chosen      min(count, n) chunks
    """
    estimate = estimate or Debiased(columns, solution)
    n_chunks, unit = solution.n_chunks, max(estimate.noise, np.finfo(float).tiny)
    guides = 1 if alone is None else 2
    shares = [count * (number + 1) // guides - count * number // guides for number in range(guides)]
    # a guide's next best too, for the margins; and the last one's may be taken by the first
    best = [_Best(1 + sum(shares[: number + 1])) for number in range(guides)]
    moments, everything = _Moments(), count >= n_chunks
    for start, stop in _parts_of(n_chunks):
        if everything and second is None:
            break
        own = estimate[start:stop]
        if second is not None:
            moments.add(own)
            if everything:
                continue
            own = own / unit + second[start:stop]
        if alone is not None:
            best[0].add(start, _strength(alone[start:stop]))
        best[-1].add(start, _strength(own))
    others = 1.0 if second is None else moments.share_of_signal(estimate.noise)
    if everything:
        return Chosen(np.arange(n_chunks), np.full((guides, n_chunks), np.inf), others)
    taken = np.empty(0, np.int64)
    cuts = []
    for own_best, share in zip(best, shares, strict=True):
        left = ~np.isin(own_best.chunks, taken)
        taken = np.concatenate([taken, own_best.chunks[left][:share]])
        cuts.append(own_best.strengths[left][share])
    chunks = np.sort(taken)
    values = estimate[chunks]
    if second is not None:
        values = values / unit + second[chunks]
    of_guides = [values] if alone is None else [alone[chunks], values]
    margins = np.stack([guide - cut for guide, cut in zip(of_guides, cuts, strict=True)])
    return Chosen(chunks, margins, others)


def trust(columns: Sequence[Any], solution: Solution) -> float:
    """How far a recovery can be trusted, 0 … 1: the share of the debiased estimate's variance over chunks
    that is not its error's. Parameters as for `candidates`."""
    estimate, moments = Debiased(columns, solution), _Moments()
    for start, stop in _parts_of(len(estimate)):
        moments.add(estimate[start:stop])
    return moments.share_of_signal(estimate.noise)


def debiased(columns: Sequence[Any], solution: Solution) -> tuple[np.ndarray, float]:
    """All of `Debiased`, (n,) float64, and the standard deviation of its error."""
    estimate = Debiased(columns, solution)
    return estimate[:], estimate.noise


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
