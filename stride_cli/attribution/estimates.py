"""Estimates of every chunk's influence on a query, before and after the likeliest chunks have been read.

*Before*: projections estimate scored_i g_i · g_x with a Gaussian error whose size is the chunk's gradient,
and chunks share pairs of tokens with the query. Both, in units of their own spread, say which chunks are
candidates for an exact gradient (`Estimate.strength`).

*After* (`Posteriors`): what a chunk can be given its projection follows from how influences are distributed,
which all estimates of the query tell together (`recovery.posterior`). The distribution is centred on what the
shared pairs predict, by a line through the estimates of this very query: pairs count as far as projections
bear them out. The mean of a small estimate is next to nothing, so that the small influences of thousands of
chunks do not add up to noise. Near-duplicates share credit, read or not (`operators.redundancy`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from stride_cli.attribution.direct import Exact, query_gradients
from stride_cli.recovery.posterior import Posterior

if TYPE_CHECKING:
    from stride_cli.attribution.shared_pairs import PairScores, QueryPairs
    from stride_cli.data.batches import Batch
    from stride_cli.data.query_set import QuerySet
    from stride_cli.data.workspace import Workspace
    from stride_cli.operators.projections import AskedProjections
    from stride_cli.operators.redundancy import Redundancy
    from stride_cli.operators.steered_model import SteeredModel
    from stride_cli.recovery.problem import Solution

_ROWS = 1 << 18  # chunks that are estimated together
# of more chunks than these, what all estimates have in common is learnt from so many, in stretches all over
# the corpus: another pass over all projections would change means and spreads by a fifth of a percent
_SCANNED_TWICE, _SAMPLED, _STRETCH = 1 << 20, 1 << 18, 1 << 12
_ROUNDING = 1e-7  # a spread that is smaller, beside what it is of, is none
_MOST_KEPT = 1 << 17  # influences of a query, the largest of those that are not read
_FARTHEST = 6.0  # standard deviations: an error of so many is none
# chunks of which it is asked how likely they are to be above: of all ranges together, and of each at least
_COUNTED, _FEWEST_COUNTED = 1 << 15, 1 << 9


# ---- before chunks are read ----


@dataclass(frozen=True)
class Estimates:
    """Estimates of all chunks' influences on Q queries, by one model.

    They are computed part by part as they are asked for: of 10⁸ chunks each query's were 800 MB. Projections
    count as u_i = estimate_i / √step_i. Halfway to units of their errors the 100 highest hold more of the 50
    strongest chunks (instructions: .43 for .37 at 512 bytes a chunk) and as many of the 10 strongest.

    Attributes
    ----------
    n_chunks : n
    pairs : PairScores                     what chunks share with the queries
    asked : AskedProjections or None       of the queries; None without projections
    means, spreads : (Q,) float64          of u over the chunks that are projected
    together : (Q,) float64                spread of projections and pairs together
    redundancy : Redundancy or None        directions in which near-duplicates say the same
    """

    n_chunks: int
    pairs: PairScores
    asked: AskedProjections | None
    means: np.ndarray
    spreads: np.ndarray
    together: np.ndarray
    redundancy: Redundancy | None = None

    @classmethod
    def of(
        cls, steered: SteeredModel, queries: QuerySet, batches: Sequence[Batch], workspace: Workspace
    ) -> Estimates:
        """Estimate for queries, which `batches` hold in order.

        Chunks appended after the projections were made have none: 0, the mean.
        """
        from stride_cli.attribution.shared_pairs import pair_scores

        pairs = pair_scores(queries, workspace.chunks, workspace.model.vocab_size)
        same, projections = np.ones(len(queries)), steered.operators.projections
        # 1. Pairs alone: their scores are standardised already
        found = cls(workspace.n_chunks, pairs, None, np.zeros(len(queries)), same, same)
        if projections is None:
            return found
        # 2. Projections, at mean 0 and variance 1 over the chunks
        asked = projections.asked(query_gradients(steered, batches))
        means, spreads = _moments(asked)
        found = replace(found, asked=asked, means=means, spreads=spreads)
        # 3. Their sum is not of variance 2: the two are correlated
        together = np.array([found.of_query(query).spread_together() for query in range(len(queries))])
        together[together <= _ROUNDING] = 1.0
        return replace(found, together=together, redundancy=steered.operators.redundancy)

    def of_query(self, query: int, lasso: Solution | None = None) -> Estimate:
        """The estimates of one query, with the Lasso's solution for it."""
        return Estimate(self, query, self.pairs.of(query), lasso)


def _moments(asked: AskedProjections) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of u over chunks, (Q,) each; the deviation is 0 where all are equal."""
    sums, squares, seen = np.zeros(len(asked.units)), np.zeros(len(asked.units)), 0
    for start, stop in _stretches(len(asked.projections), _SCANNED_TWICE):
        found = _evened(asked.estimates(start, stop), asked.projections.step[start:stop])
        sums += found.sum(axis=1)
        squares += np.einsum("qn,qn->q", found, found)
        seen += stop - start
    # E[u²] − E[u]²: of estimates that are all equal, rounding is all that is left of it
    means = sums / max(1, seen)
    spreads = np.sqrt(np.maximum(0.0, squares / max(1, seen) - np.square(means)))
    spreads[spreads <= _ROUNDING * np.abs(means)] = 0.0
    return means, spreads


def _evened(estimates: np.ndarray, step: np.ndarray) -> np.ndarray:
    """Estimates / √step, float64; 0 where the step is."""
    size = np.sqrt(np.asarray(step))
    found: np.ndarray = estimates.astype(np.float64)
    np.divide(found, size, out=found, where=size > 0)
    return found


def _stretches(count: int, most: int) -> Iterator[tuple[int, int]]:
    """Ranges of chunks to learn from: all, or of more than `most` stretches evenly spaced."""
    if count <= most:
        for start in range(0, count, _ROWS):
            yield start, min(start + _ROWS, count)
        return
    # stretches and not single chunks: codes are read from disk in long runs
    for start in np.linspace(0, count - _STRETCH, _SAMPLED // _STRETCH).astype(int).tolist():
        yield start, start + _STRETCH


@dataclass
class Estimate:
    """Estimates of one query.

    Attributes
    ----------
    of : Estimates              of all queries
    query : int                 its number
    pairs : QueryPairs          that chunks share with it
    lasso : Solution or None    what the subsets alone say; None until it is solved
    """

    of: Estimates
    query: int
    pairs: QueryPairs
    lasso: Solution | None = None
    # u at mean 0 and variance 1 of the range that was asked for last: candidates are looked at by both guides
    _last: tuple[tuple[int, int], np.ndarray] | None = None

    @property
    def n_chunks(self) -> int:
        return self.of.n_chunks

    @property
    def asked(self) -> AskedProjections:
        """The projections; only asked for where there are some."""
        assert self.of.asked is not None
        return self.of.asked

    @property
    def whole(self) -> bool:
        """True where every chunk has a projection."""
        return self.of.asked is not None and len(self.of.asked.projections) >= self.n_chunks

    @property
    def _varied(self) -> bool:
        return bool(self.of.asked is not None and self.of.spreads[self.query] > 0)

    @property
    def _spread(self) -> float:
        """The standard deviation of u over all n chunks, those without a projection at the mean."""
        if not self._varied:
            return 1.0
        covered = len(self.asked.projections) / max(1, self.n_chunks)
        return float(self.of.spreads[self.query] * np.sqrt(min(1.0, covered)))

    def spread_together(self) -> float:
        """Standard deviation of the sum of projections and pairs, each at variance 1."""
        own = self.pairs
        # of pairs all but a few chunks have the same number, which drops out
        # cov(a, b) = Σ a b / n, as projections have mean 0
        shared = float(own.scores @ self.by_projections(own.chunks))
        covariance = shared / own.spread / max(1, self.n_chunks)
        return float(np.sqrt(max(0.0, own.varied + self._varied + 2.0 * covariance)))

    def by_projections(self, rows: slice | np.ndarray) -> np.ndarray:
        """Strength by projections alone, whose errors are known: of a range of chunks, or of given ones."""
        if self.of.asked is None:
            return np.zeros(rows.stop - rows.start if isinstance(rows, slice) else len(rows))
        if not isinstance(rows, slice):
            # appended chunks have no projection yet: 0, the mean
            found = np.zeros(len(rows))
            known = rows < len(self.asked.projections)
            some = rows[known]
            found[known] = self._standard(self.asked.of(self.query, some), self.asked.projections.step[some])
            return found
        if self._last is None or self._last[0] != (rows.start, rows.stop):
            stop = max(rows.start, min(rows.stop, len(self.asked.projections)))
            own = self.asked.estimates(rows.start, stop, slice(self.query, self.query + 1))[0]
            found = np.zeros(rows.stop - rows.start)
            found[: stop - rows.start] = self._standard(own, self.asked.projections.step[rows.start : stop])
            self._last = (rows.start, rows.stop), found
        return self._last[1]

    def _standard(self, estimates: np.ndarray, step: np.ndarray) -> np.ndarray:
        found: np.ndarray = (_evened(estimates, step) - self.of.means[self.query]) / self._spread
        return found

    def strength(self, rows: slice | np.ndarray) -> np.ndarray:
        """Strength by projections and pairs, at mean 0 and variance 1 (0 where all are equal), float64."""
        both: np.ndarray = self.by_projections(rows) + self.pairs.standard(rows)
        return both / self.of.together[self.query]

    def projected(self, exact: Exact) -> Callable[[int, int], tuple[np.ndarray, np.ndarray]]:
        """Influences of a range of chunks by projections, and the standard deviations of their errors, in the
        unit of exact ones; every chunk has a projection."""
        asked, query, factor, offset = self.asked, self.query, exact.factor, exact.offset
        error = abs(factor * float(asked.noise[query]))

        @lru_cache(maxsize=2)  # a corpus that is not large is one range
        def part(start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
            own = asked.estimates(start, stop, slice(query, query + 1))[0].astype(np.float64)
            step = np.asarray(asked.projections.step[start:stop], np.float64)
            return factor * own - offset, error * step

        return part

    def odds(self, exact: Exact, margins: np.ndarray) -> np.ndarray | None:
        """Return the probability that each candidate had of being chosen, over the errors of the projections.

        Parameters
        ----------
        exact : Exact
        margins : (2, t) float64      how much lower its strength could have been: by projections, by both

        Returns
        -------
        ndarray (t,) float64, 0 … 1; None where nothing is known of errors: not all chunks are projected
        """
        if not self.whole:
            return None
        from scipy.special import ndtr  # takes a tenth of a second to import

        odds = np.zeros(len(exact.chunks))
        step = np.asarray(self.asked.projections.step[exact.chunks])
        size = np.sqrt(step.astype(np.float64))
        error = exact.products - self.asked.of(self.query, exact.chunks)
        error = np.divide(error, size, out=np.zeros_like(size), where=size > 0)
        for own, weight in zip(margins, (1.0, 1.0 / self.of.together[self.query]), strict=True):
            weight /= self._spread
            # the strength that exact numbers would have had, and how far errors take it from there
            spare, spread = own + weight * error, weight * float(self.asked.noise[self.query]) * size
            # errors are the same for either guide: a chunk is read where the kinder of them would
            certain = np.where(spare > 0, np.inf, -np.inf)
            odds = np.maximum(odds, ndtr(np.divide(spare, spread, out=certain, where=spread > 0)))
        return odds


# ---- after chunks were read ----


class Shared:
    """The credit that near-duplicates share in the influences of one query: V (Λ / (Λ + ridge + 1)) Vᵀ w."""

    def __init__(self, directions: Redundancy, weights: np.ndarray) -> None:
        self._directions, self._weights = directions, weights

    @classmethod
    def of(
        cls, directions: Redundancy, ridge: float, seen: Sequence[tuple[np.ndarray, np.ndarray, float]]
    ) -> Shared:
        """From influences of all chunks, or of samples of them.

        Parameters
        ----------
        directions : V, Λ
        ridge : γ, in chunks
        seen : (t,) chunks, (t,) float64 their influences, and how many chunks each stands for
        """
        total = np.zeros(len(directions.values))
        for chunks, influences, stands_for in seen:
            total += stands_for * (influences @ np.asarray(directions.vectors[chunks], np.float64))
        return cls(directions, total * directions.values / (directions.values + ridge + 1.0))

    def __getitem__(self, chunks: slice | np.ndarray, /) -> np.ndarray:
        """Return it for a range of chunks or for given ones, float64; the mean over all chunks is 0."""
        own, weights = self._directions, self._weights
        found = np.asarray(own.vectors[chunks]) @ weights.astype(np.float32) - own.means @ weights
        return np.asarray(found, np.float64)


class _Looked(NamedTuple):
    """A range of chunks, (t,) float64 each: estimates without shared credit, the standard deviations of their
    errors, what pairs predict, posterior means."""

    values: np.ndarray
    spread: np.ndarray
    predicted: np.ndarray
    means: np.ndarray


@dataclass(frozen=True)
class Posteriors:
    """Every chunk's influence on one query given its projection, part by part.

    Attributes
    ----------
    n_chunks : n
    projected : range of chunks → their influences by projections, and the standard deviations of their errors
    posterior : Posterior         of estimates, less what pairs predict, in units of their errors
    shared : Shared or None       what is taken from all of them, and from what was read
    pairs : QueryPairs or None    that chunks share with the query
    slope : float                 what a standard deviation of these predicts
    """

    n_chunks: int
    projected: Callable[[int, int], tuple[np.ndarray, np.ndarray]]
    posterior: Posterior
    shared: Shared | None = None
    pairs: QueryPairs | None = None
    slope: float = 0.0

    @classmethod
    def learnt(
        cls,
        n_chunks: int,
        projected: Callable[[int, int], tuple[np.ndarray, np.ndarray]],
        exact: Exact,
        pairs: QueryPairs | None = None,
        directions: Redundancy | None = None,
        ridge: float = 0.0,
    ) -> Posteriors:
        """Learn from all chunks, or a sample of them.

        Parameters
        ----------
        n_chunks, projected, pairs : see the attributes
        exact : Exact               what was read
        directions, ridge           with which near-duplicates share credit; None: they do not
        """
        seen = ((np.arange(*each), *projected(*each)) for each in _stretches(n_chunks, _ROWS))
        chunks, values, spread = (np.concatenate(parts) for parts in zip(*seen, strict=True))
        shared = None
        if directions is not None:
            # 1. What near-duplicates share: of products with the query, of which influences leave the mean
            # out. Each chunk that was not read stands for as many as the sample leaves out
            others = ~np.isin(chunks, exact.chunks)
            stands_for = (n_chunks - len(exact.chunks)) / max(1, int(others.sum()))
            products = [
                (chunks[others], values[others] + exact.offset, stands_for),
                (exact.chunks, exact.influences + exact.offset, 1.0),
            ]
            # what is shared is taken from the estimates, so that the distribution is of what is left
            shared = Shared.of(directions, ridge, products)
            values = values - shared[chunks]
        slope = 0.0
        if pairs is not None and pairs.varied:
            # 2. What pairs predict, with exact values where there are any
            scores = pairs.standard(chunks)
            _, places, own = np.intersect1d(chunks, exact.chunks, assume_unique=True, return_indices=True)
            known, errors = values.copy(), spread.copy()
            known[places] = exact.influences[own]
            if shared is not None:
                known[places] -= shared[exact.chunks[own]]
            # exact values have no errors, and weigh most in the line
            errors[places] = 0.0
            slope = _slope(known, errors, scores)
            values = values - slope * scores
        # 3. How what is left is distributed, in units of its errors
        some = spread > 0  # a chunk without a scored token has no error
        return cls(n_chunks, projected, Posterior.learnt(values[some] / spread[some]), shared, pairs, slope)

    @cached_property
    def _whole(self) -> _Looked:
        return self._range(0, self.n_chunks)

    def _looked(self, start: int, stop: int) -> _Looked:
        # a corpus of one range is looked at by `known` and by `kept`
        return self._whole if (start, stop) == (0, self.n_chunks) else self._range(start, stop)

    def _range(self, start: int, stop: int) -> _Looked:
        values, spread = self.projected(start, stop)
        if self.shared is not None:
            values = values - self.shared[start:stop]
        predicted = np.zeros(stop - start)
        if self.pairs is not None and self.slope:
            predicted = self.slope * self.pairs.standard(slice(start, stop))
        # where there is no error the estimate is the value; elsewhere E[w | estimate] is
        means, known = values.copy(), spread > 0
        away = (values - predicted)[known] / spread[known]
        means[known] = predicted[known] + spread[known] * self.posterior(away)
        return _Looked(values, spread, predicted, means)

    def known(self, exact: Exact) -> tuple[np.ndarray, np.ndarray]:
        """Means of all chunks with what they share, and variances, 0 of those that were read: (n,) each."""
        values, spread, predicted, means = self._looked(0, self.n_chunks)
        means, variances = means.copy(), np.zeros(self.n_chunks)
        some = spread > 0
        away = (values - predicted)[some] / spread[some]
        # in units of the errors the posterior is one function, whatever a chunk's step
        variances[some] = np.square(spread[some]) * self.posterior.variances(away)
        if self.shared is not None:
            means += self.shared[0 : self.n_chunks]
        means[exact.chunks], variances[exact.chunks] = exact.influences, 0.0
        return means, variances

    def shared_out(self, exact: Exact) -> np.ndarray:
        """Exact influences without what the chunks share with near-duplicates, (t,)."""
        return exact.influences if self.shared is None else exact.influences - self.shared[exact.chunks]

    def kept(self, without: np.ndarray, thresholds: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return posterior means of the unread chunks; of a large corpus the largest 131,072.

        Parameters
        ----------
        without : (t,) int64 ascending      the chunks that were read
        thresholds : (m,) float64

        Returns
        -------
        chunks, values : all of a corpus that is not large, else the strongest, and their posterior means
        above : (m,) float64      how many of the others are to be expected above each threshold
        """
        chunks, values, above = np.empty(0, np.int64), np.empty(0), np.zeros(len(thresholds))
        for start in range(0, self.n_chunks, _ROWS):
            stop = min(start + _ROWS, self.n_chunks)
            together, spread, predicted, own = self._looked(start, stop)
            # exact values take the place of these: not kept here, and not counted above a threshold
            own, others = own.copy(), together.copy()
            first, last = np.searchsorted(without, [start, stop])
            # `without` is ascending: those of this range lie together
            inside = without[first:last] - start
            own[inside], others[inside] = 0.0, -np.inf
            above += self._above(others, spread, predicted, thresholds)
            left = np.flatnonzero(own)
            chunks, values = np.concatenate([chunks, start + left]), np.concatenate([values, own[left]])
            # whatever n is, no more is held than the largest so far
            if len(chunks) > _MOST_KEPT:
                strongest = np.sort(np.argpartition(-np.abs(values), _MOST_KEPT)[:_MOST_KEPT])
                chunks, values = chunks[strongest], values[strongest]
        return chunks, values, above

    def _above(
        self, values: np.ndarray, spread: np.ndarray, predicted: np.ndarray, thresholds: np.ndarray
    ) -> np.ndarray:
        """Count how many of these are to be expected above each threshold."""
        if not len(thresholds):
            return np.zeros(0)
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
