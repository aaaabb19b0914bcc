"""Estimate every chunk's influence on a query from projections and shared pairs: μ and τ of the one problem.

Projections estimate scored_i g_i · g_x with a Gaussian error of known size, the chunk's gradient's. What a
chunk can be given its estimate follows from how influences are distributed, which all estimates of the query
tell together (`recovery.posterior`). The distribution is centred on what shared pairs of tokens predict, by a
line through the estimates of this very query: pairs count as far as projections bear them out. The mean of a
small estimate is next to nothing, so that small influences of thousands of chunks do not add up to noise.

Near-duplicates share credit (`operators.redundancy`): what they say alike is taken from estimates, exact
values and measurements before the problem is solved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

import numpy as np

from stride_cli.attribution.direct import Exact, query_gradients
from stride_cli.recovery.posterior import Posterior
from stride_cli.recovery.problem import Prior

if TYPE_CHECKING:
    from stride_cli.attribution.shared_pairs import QueryPairs
    from stride_cli.data.batches import Batch
    from stride_cli.data.query_set import QuerySet
    from stride_cli.data.workspace import Workspace
    from stride_cli.operators.projections import AskedProjections
    from stride_cli.operators.redundancy import Redundancy
    from stride_cli.operators.steered_model import SteeredModel

_ROWS = 1 << 18  # chunks that are estimated together
# of more chunks than these, what all estimates have in common is learnt from so many, in stretches all over
# the corpus: another pass over all projections would change means and spreads by a fifth of a percent
_SCANNED_TWICE, _SAMPLED, _STRETCH = 1 << 20, 1 << 18, 1 << 12
_FARTHEST = 6.0  # standard deviations: an error of so many is none
# chunks of which it is asked how likely they are to be above: of all ranges together, and of each at least
_COUNTED, _FEWEST_COUNTED = 1 << 15, 1 << 9

# a range of chunks → their influences by projections, and the standard deviations of the errors of these
Projected = Callable[[int, int], tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True)
class Estimate:
    """Estimates of all chunks' influences on one query, by one model.

    They are computed part by part as they are asked for: of 10⁸ chunks each query's were 800 MB.

    Attributes
    ----------
    asked : AskedProjections     of all queries; every chunk has a projection
    query : int                  its number
    pairs : QueryPairs or None   that chunks share with it
    directions : Redundancy or None    in which near-duplicates say the same
    """

    asked: AskedProjections
    query: int
    pairs: QueryPairs | None = None
    directions: Redundancy | None = None

    @classmethod
    def of(
        cls, steered: SteeredModel, queries: QuerySet, batches: Sequence[Batch], workspace: Workspace
    ) -> list[Estimate]:
        """Estimate for each of some queries, which `batches` hold in order."""
        from stride_cli.attribution.shared_pairs import pair_scores

        projections = steered.operators.projections
        assert projections is not None
        pairs = pair_scores(queries, workspace.chunks, workspace.model.vocab_size)
        asked = projections.asked(*(query_gradients(steered, [batch]) for batch in batches))
        same = steered.operators.redundancy
        return [cls(asked, query, pairs.of(query), same) for query in range(len(queries))]

    def given(self, exact: Exact, ridge: float = 0.0) -> Posteriors:
        """What chunks can be given these estimates and some exact values, in the unit of the latter.

        With a ridge, in chunks, near-duplicates share credit.
        """
        n_chunks, projected = len(self.asked.projections), self._projected(exact)
        if not ridge or self.directions is None:
            return Posteriors.learnt(n_chunks, projected, exact, self.pairs)
        # what is shared is taken from estimates and exact values, so that the distribution is of what is left
        shared = shared_credit(self.directions, ridge, n_chunks, projected, exact)

        @lru_cache(maxsize=2)
        def left(start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
            values, errors = projected(start, stop)
            return values - shared[start:stop], errors

        own = replace(exact, taken=shared[exact.chunks])
        return Posteriors.learnt(n_chunks, left, own, self.pairs, shared)

    def _projected(self, exact: Exact) -> Projected:
        asked, query, factor, offset = self.asked, self.query, exact.factor, exact.offset
        error = abs(factor * float(asked.noise[query]))

        @lru_cache(maxsize=2)  # a corpus that is not large is one range
        def part(start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
            own = asked.estimates(start, stop, slice(query, query + 1))[0].astype(np.float64)
            step = np.asarray(asked.projections.step[start:stop], np.float64)
            return factor * own - offset, error * step

        return part


def _stretches(count: int, most: int) -> Iterator[tuple[int, int]]:
    """Ranges of chunks to learn from: all, or of more than `most` stretches evenly spaced."""
    if count <= most:
        for start in range(0, count, _ROWS):
            yield start, min(start + _ROWS, count)
        return
    # stretches and not single chunks: codes are read from disk in long runs
    for start in np.linspace(0, count - _STRETCH, _SAMPLED // _STRETCH).astype(int).tolist():
        yield start, start + _STRETCH


class Shared:
    """The credit that near-duplicates share in the influences of one query: V (Λ / (Λ + ridge + 1)) Vᵀ w."""

    def __init__(self, directions: Redundancy, weights: np.ndarray) -> None:
        self._directions, self._weights = directions, weights

    def __getitem__(self, chunks: slice | np.ndarray, /) -> np.ndarray:
        """Return it for a range of chunks or for given ones, float64; the mean over all chunks is 0."""
        own, weights = self._directions, self._weights
        found = np.asarray(own.vectors[chunks]) @ weights.astype(np.float32) - own.means @ weights
        return np.asarray(found, np.float64)


def shared_credit(
    directions: Redundancy, ridge: float, n_chunks: int, projected: Projected, exact: Exact
) -> Shared:
    """Find the credit that near-duplicates share, from estimates of all chunks, or of a sample, and exact
    values; ridge in chunks."""
    seen = ((np.arange(*each), *projected(*each)) for each in _stretches(n_chunks, _ROWS))
    chunks, values, _ = (np.concatenate(parts) for parts in zip(*seen, strict=True))
    others = ~np.isin(chunks, exact.chunks)
    # each chunk without an exact value stands for as many as the sample leaves out. Credit is shared in
    # products with the query, of which influences leave the mean out
    stands_for = (n_chunks - len(exact.chunks)) / max(1, int(others.sum()))
    total = stands_for * ((values[others] + exact.offset) @ np.asarray(directions.vectors[chunks[others]]))
    total = total + (exact.influences + exact.offset) @ np.asarray(directions.vectors[exact.chunks])
    return Shared(directions, total * directions.values / (directions.values + ridge + 1.0))


@dataclass(frozen=True)
class Posteriors:
    """Every chunk's influence on one query given its projection, part by part.

    Attributes
    ----------
    n_chunks : n
    projected : Projected
    exact : Exact                 what is known without an error
    posterior : Posterior         of estimates, less what pairs predict, in units of their errors
    pairs : QueryPairs or None    that chunks share with the query
    slope : float                 what a standard deviation of these predicts
    shared : Shared or None       what was taken from all of them
    """

    n_chunks: int
    projected: Projected
    exact: Exact
    posterior: Posterior
    pairs: QueryPairs | None = None
    slope: float = 0.0
    shared: Shared | None = None

    @classmethod
    def learnt(
        cls,
        n_chunks: int,
        projected: Projected,
        exact: Exact,
        pairs: QueryPairs | None = None,
        shared: Shared | None = None,
    ) -> Posteriors:
        """Learn how influences are distributed, from all chunks or a sample of them; see the attributes."""
        seen = ((np.arange(*each), *projected(*each)) for each in _stretches(n_chunks, _SCANNED_TWICE))
        chunks, values, spread = (np.concatenate(parts) for parts in zip(*seen, strict=True))
        slope = 0.0
        if pairs is not None and pairs.varied:
            # 1. What pairs predict, with exact values where there are any
            scores = pairs.standard(chunks)
            _, places, own = np.intersect1d(chunks, exact.chunks, assume_unique=True, return_indices=True)
            known, errors = values.copy(), spread.copy()
            # exact values have no errors, and weigh most in the line
            known[places], errors[places] = exact.influences[own], 0.0
            slope = _slope(known, errors, scores)
            values = values - slope * scores
        # 2. How what is left is distributed, in units of its errors
        some = spread > 0  # a chunk without a scored token has no error
        posterior = Posterior.learnt(values[some] / spread[some])
        return cls(n_chunks, projected, exact, posterior, pairs, slope, shared)

    def _range(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Estimates of a range of chunks, the standard deviations of their errors, what pairs predict."""
        values, spread = self.projected(start, stop)
        predicted = np.zeros(stop - start)
        if self.pairs is not None and self.slope:
            predicted = self.slope * self.pairs.standard(slice(start, stop))
        return values, spread, predicted

    @cached_property
    def prior(self) -> Prior:
        """Posterior means and standard deviations of all chunks; of those known exactly, the values and 0."""
        means, spreads = np.empty(self.n_chunks), np.zeros(self.n_chunks)
        for start in range(0, self.n_chunks, _ROWS):
            part = slice(start, min(start + _ROWS, self.n_chunks))
            values, spread, predicted = self._range(part.start, part.stop)
            # where there is no error the estimate is the value; elsewhere E[w | estimate] is. In units of the
            # errors the posterior is one function, whatever a chunk's step
            known = spread > 0
            away = (values - predicted)[known] / spread[known]
            means[part] = values
            means[part][known] = predicted[known] + spread[known] * self.posterior(away)
            spreads[part][known] = spread[known] * np.sqrt(self.posterior.variances(away))
        means[self.exact.chunks], spreads[self.exact.chunks] = self.exact.influences, 0.0
        return Prior(means, spreads)

    def expected_above(self, thresholds: np.ndarray) -> np.ndarray:
        """Count how many of the chunks that are not known exactly are to be expected above each threshold.

        Parameters
        ----------
        thresholds : (m,) float64

        Returns
        -------
        ndarray (m,) float64
        """
        above = np.zeros(len(thresholds))
        for start in range(0, self.n_chunks, _ROWS):
            stop = min(start + _ROWS, self.n_chunks)
            values, spread, predicted = self._range(start, stop)
            first, last = np.searchsorted(self.exact.chunks, [start, stop])
            others = values.copy()
            others[self.exact.chunks[first:last] - start] = -np.inf
            above += self._above(others, spread, predicted, thresholds)
        return above

    def _above(
        self, values: np.ndarray, spread: np.ndarray, predicted: np.ndarray, thresholds: np.ndarray
    ) -> np.ndarray:
        """`expected_above` of a range of chunks."""
        # chunks whose estimates are many errors below the least threshold add nothing to any count
        least = thresholds.min()
        near = np.flatnonzero((spread > 0) & (values > least - _FARTHEST * spread))
        stands_for = np.ones(len(near))
        # of many: those that are closest, and some of the others
        most = max(_FEWEST_COUNTED, _COUNTED * _ROWS // max(_ROWS, self.n_chunks)) // 2
        if len(near) > 2 * most:
            closest = np.argpartition((least - values[near]) / spread[near], most)
            rest = closest[most :: -(-(len(near) - most) // most)]
            stands_for = np.repeat([1.0, (len(near) - most) / len(rest)], [most, len(rest)])
            near = near[np.concatenate([closest[:most], rest])]
        own, line = spread[near], predicted[near]
        away = (values[near] - line) / own
        found = [stands_for @ self.posterior.above(away, (each - line) / own) for each in thresholds]
        return np.array(found)


def _slope(values: np.ndarray, spread: np.ndarray, scores: np.ndarray) -> float:
    """Fit a line through values with these errors, over scores, and shrink its slope by how well it is known
    (positive-part James-Stein): of a slope within its standard error nothing is left."""
    variances = np.square(spread)
    # where every chunk was read there are no errors
    weights = 1.0 / (variances + variances.mean()) if variances.any() else np.ones(len(values))
    weights /= weights.sum()
    away = scores - weights @ scores
    size = float(weights @ np.square(away))
    if not size > 0:
        return 0.0
    # weighted least squares, and its residuals
    slope = float((weights * away) @ values) / size
    left = values - weights @ values - slope * away
    # robust to errors of different sizes (White, Econometrica 48, 1980)
    variance = float(np.square(weights * away * left).sum()) / size**2
    return slope * max(0.0, 1.0 - variance / slope**2) if slope else 0.0
