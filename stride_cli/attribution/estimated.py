"""Chunks that are not read: what their projections, their pairs of tokens and the subsets say of them.

A projection's estimate of a chunk's influence has an error of known size, Gaussian, as large as the chunk's
gradient. What a chunk can be, given that, follows from how influences are distributed, which all estimates
of the query tell together (`recovery.posterior`): means of small estimates are next to nothing, so that the
small influences of thousands of chunks do not add up to noise.

What that distribution is centred on is what the pairs of tokens that a chunk shares with the query predict of
it: a line through the estimates of this very query, so that pairs count as far as projections bear them out.
Where they do not, the line is flat.

And the subsets' responses are what all chunks of a subset add up to, those that were read included. What
estimates leave of them is shared out among the chunks that are known least (`recovery.conditioning`).

What many chunks say alike is shared out among them (`attribution.shared_influence`), whether they were read
or not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from stride_cli.attribution.shared_influence import Shared
from stride_cli.recovery.conditioning import Known, corrections, tell
from stride_cli.recovery.posterior import Posterior

if TYPE_CHECKING:
    from stride_cli.attribution.direct_readout import InfluenceUnit
    from stride_cli.attribution.shared_pairs import QueryPairs
    from stride_cli.operators.projections import AskedProjections
    from stride_cli.operators.redundancy import Redundancy
    from stride_cli.recovery.problem import Solution

_ROWS = 1 << 18  # chunks that are estimated together
# what is learnt of a larger corpus is a sample's, in stretches all over it
_SAMPLED, _STRETCH = 1 << 18, 1 << 12
_MOST_KEPT = 1 << 17  # influences of a query, the largest of those that are not read
_FARTHEST = 6.0  # standard deviations
# chunks of which it is asked how likely they are to be above: of all ranges together, and of each at least
_COUNTED, _FEWEST_COUNTED = 1 << 15, 1 << 9


@dataclass(frozen=True)
class Read:
    """What is known exactly, and of which chunks others repeat what they say.

    Attributes
    ----------
    chunks : (t,) int64 ascending      that were read
    influences : (t,) float64          theirs
    mean : float                       of all chunks' products with the query, which influences leave out
    directions, ridge                  of `Shared`; without directions nothing is shared out
    """

    chunks: np.ndarray
    influences: np.ndarray
    mean: float = 0.0
    directions: Sequence[Redundancy] = ()
    ridge: float = 0.0


@dataclass(frozen=True)
class Responses:
    """What the subsets of all models answer to one query.

    Attributes
    ----------
    columns : of each model, (n, d) integers      the subsets that hold each chunk
    values : of each model, (K,) float64          on the scale of subset sums
    exact : bool                                  whether they are sums of influences, all but exactly
    intercept : bool                              whether they have a constant
    """

    columns: Sequence[Any]
    values: Sequence[np.ndarray]
    exact: bool
    intercept: bool

    @property
    def tell(self) -> bool:
        """Whether there are subsets enough to say anything of single chunks."""
        return tell(len(self.columns[0]), len(self.values[0]))


class _Looked(NamedTuple):
    """Of a range of chunks, (t,) float64 each: estimates without what is shared, the standard deviations of
    their errors, what pairs predict, posterior means."""

    values: np.ndarray
    spread: np.ndarray
    predicted: np.ndarray
    means: np.ndarray


@dataclass(frozen=True)
class Estimates:
    """Of one query, every chunk's influence by projections and pairs, part by part.

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
    def of(
        cls,
        n_chunks: int,
        projected: Callable[[int, int], tuple[np.ndarray, np.ndarray]],
        read: Read | None = None,
        pairs: QueryPairs | None = None,
    ) -> Estimates:
        """Learnt from all chunks, or a sample of them.

        Parameters
        ----------
        read : Read             by default nothing was
        pairs : QueryPairs      by default nothing is predicted
        """
        seen = zip(*_looked_at(n_chunks, projected), strict=True)
        chunks, values, spread = (np.concatenate(parts) for parts in seen)
        shared = None
        if read is not None and read.directions:
            shared = _shared(read, chunks, values, n_chunks)
            values = values - shared[chunks]
        slope = 0.0
        if pairs is not None and pairs.varied:
            scores = pairs.standard(chunks)
            slope = _slope(*_with_read(read, shared, chunks, values, spread), scores)
            values = values - slope * scores
        known = spread > 0
        learnt = Posterior.learnt(values[known] / spread[known])
        return cls(n_chunks, projected, learnt, shared, pairs, slope)

    def part(self, start: int, stop: int) -> np.ndarray:
        """Posterior means of a range of chunks, float64."""
        return self._looked(start, stop).means

    @cached_property
    def _whole(self) -> _Looked:
        return self._range(0, self.n_chunks)

    def _looked(self, start: int, stop: int) -> _Looked:
        # a corpus of one range is looked at by `known` and by `kept`
        return self._whole if (start, stop) == (0, self.n_chunks) else self._range(start, stop)

    def _range(self, start: int, stop: int) -> _Looked:
        values, spread = self._of_range(start, stop)
        predicted = self._predicted(start, stop)
        return _Looked(values, spread, predicted, self._means(values, spread, predicted))

    def _of_range(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Estimates without what is shared, and their errors."""
        values, spread = self.projected(start, stop)
        return (values if self.shared is None else values - self.shared[start:stop]), spread

    def _predicted(self, start: int, stop: int) -> np.ndarray:
        """What pairs predict of a range of chunks, float64."""
        if self.pairs is None or not self.slope:
            return np.zeros(stop - start)
        return self.slope * self.pairs.standard(slice(start, stop))

    def _means(self, values: np.ndarray, spread: np.ndarray, predicted: np.ndarray) -> np.ndarray:
        known = spread > 0
        found = values.copy()
        away = (values - predicted)[known] / spread[known]
        found[known] = predicted[known] + spread[known] * self.posterior(away)
        return found

    def known(self, read: Read) -> Known:
        """What is known of all chunks, with what they share: means, and variances, 0 of those that were
        read."""
        values, spread, predicted, means = self._looked(0, self.n_chunks)
        means, variances = means.copy(), np.zeros(self.n_chunks)
        some = spread > 0
        away = (values - predicted)[some] / spread[some]
        variances[some] = np.square(spread[some]) * self.posterior.variances(away)
        if self.shared is not None:
            means += self.shared[0 : self.n_chunks]
        means[read.chunks], variances[read.chunks] = read.influences, 0.0
        return Known(means, variances)

    def shared_out(self, chunks: np.ndarray, influences: np.ndarray) -> np.ndarray:
        """Exact influences of chunks without what they share with others."""
        return influences if self.shared is None else influences - self.shared[chunks]

    def kept(
        self, without: np.ndarray, thresholds: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of the chunks that are not among those, (t,) ascending: which count, and what for.

        Parameters
        ----------
        without : (t,) int64 ascending
        thresholds : (m,) float64, optional

        Returns
        -------
        chunks, values : all of a corpus that is not large, else the strongest, and their posterior means
        above : (m,) float64      how many of the others are to be expected above each threshold
        """
        thresholds = np.empty(0) if thresholds is None else thresholds
        chunks, values, above = np.empty(0, np.int64), np.empty(0), np.zeros(len(thresholds))
        for start in range(0, self.n_chunks, _ROWS):
            stop = min(start + _ROWS, self.n_chunks)
            together, spread, predicted, own = self._looked(start, stop)
            own = own.copy()
            first, last = np.searchsorted(without, [start, stop])
            inside = without[first:last] - start
            own[inside] = 0.0
            others = together.copy()
            others[inside] = -np.inf
            above += self._above(others, spread, predicted, thresholds)
            left = np.flatnonzero(own)
            chunks, values = np.concatenate([chunks, start + left]), np.concatenate([values, own[left]])
            if len(chunks) > _MOST_KEPT:
                strongest = np.sort(np.argpartition(-np.abs(values), _MOST_KEPT)[:_MOST_KEPT])
                chunks, values = chunks[strongest], values[strongest]
        return chunks, values, above

    def _above(
        self, values: np.ndarray, spread: np.ndarray, predicted: np.ndarray, thresholds: np.ndarray
    ) -> np.ndarray:
        """How many of these are to be expected above each threshold."""
        if not len(thresholds):
            return np.zeros(0)
        # an error of so many standard deviations is none
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


def with_estimates(
    solution: Solution, read: Read, estimates: Estimates, responses: Responses | None = None, top: int = 0
) -> tuple[Solution, np.ndarray]:
    """The solution with the weights of chunks that were read, and of the others with what is estimated; all
    else, the residual too, is still the Lasso's. And how many chunks that were not read are to be expected
    above the strongest that were, the second, … of the `top`: (top,) float64."""
    exact = estimates.shared_out(read.chunks, read.influences)
    others, values, above = estimates.kept(read.chunks, np.sort(exact)[::-1][:top])
    if responses is not None and responses.tell:
        values = values + _by_responses(estimates.known(read), responses)[others]
    indices = np.concatenate([read.chunks, others])
    order = np.argsort(indices)
    return replace(solution, indices=indices[order], values=np.concatenate([exact, values])[order]), above


def _by_responses(known: Known, responses: Responses) -> np.ndarray:
    """What the responses add to estimates, (n,) float64: the mean over models."""
    total = np.zeros(len(known.means))
    # of several models each has influences of its own, and what is known is of their mean
    exact = responses.exact and len(responses.columns) == 1
    for columns, values in zip(responses.columns, responses.values, strict=True):
        total += corrections(columns, values, known, exact=exact, intercept=responses.intercept)
    found: np.ndarray = total / len(responses.columns)
    return found


def projected_part(
    asked: Sequence[AskedProjections], unit: InfluenceUnit, query: int
) -> Callable[[int, int], tuple[np.ndarray, np.ndarray]]:
    """Influences of a range of chunks by the projections of all models, and the spreads of their errors.

    Parameters
    ----------
    asked : of each model
    unit : of the queries
    query : which of them
    """

    @lru_cache(maxsize=2)  # a corpus that is not large is one range
    def part(start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        some = slice(query, query + 1)
        total, variance = np.zeros(stop - start), np.zeros(stop - start)
        for factor, own in zip(unit.factors[:, query], asked, strict=True):
            total += factor * own.estimates(start, stop, some)[0]
            step = np.asarray(own.projections.step[start:stop], np.float64)
            variance += np.square(factor * float(own.noise[query]) * step)
        return total - unit.offset[query], np.sqrt(variance)

    return part


def _looked_at(
    n_chunks: int, projected: Callable[[int, int], tuple[np.ndarray, np.ndarray]]
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """What is learnt from: chunks, their estimates and the errors of these."""
    if n_chunks <= _ROWS:
        ranges = [(0, n_chunks)]
    else:
        starts = np.linspace(0, n_chunks - _STRETCH, _SAMPLED // _STRETCH).astype(int).tolist()
        ranges = [(start, start + _STRETCH) for start in starts]
    for start, stop in ranges:
        yield np.arange(start, stop), *projected(start, stop)


def _shared(read: Read, chunks: np.ndarray, values: np.ndarray, n_chunks: int) -> Shared:
    """By estimates of chunks, all of them or a sample, and exact influences of those that were read."""
    others = ~np.isin(chunks, read.chunks)
    stands_for = (n_chunks - len(read.chunks)) / max(1, int(others.sum()))
    # of products with the query, of which influences leave the mean out
    seen = [
        (chunks[others], values[others] + read.mean, stands_for),
        (read.chunks, read.influences + read.mean, 1.0),
    ]
    return Shared.of(read.directions, read.ridge, seen)


def _with_read(
    read: Read | None, shared: Shared | None, chunks: np.ndarray, values: np.ndarray, spread: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Values and their errors, with those that were read in the place of estimates."""
    if read is None or not len(read.chunks):
        return values, spread
    _, places, own = np.intersect1d(chunks, read.chunks, assume_unique=True, return_indices=True)
    exact = read.influences[own]
    values, spread = values.copy(), spread.copy()
    values[places] = exact if shared is None else exact - shared[read.chunks[own]]
    spread[places] = 0.0
    return values, spread


def _slope(values: np.ndarray, spread: np.ndarray, scores: np.ndarray) -> float:
    """Of a line through values with these errors, over scores; shrunk by how well it is known (positive-part
    James-Stein): of a slope within its standard error nothing is left."""
    variances = np.square(spread)
    # where every chunk was read there are no errors
    weights = 1.0 / (variances + variances.mean()) if variances.any() else np.ones(len(values))
    weights /= weights.sum()
    away = scores - weights @ scores
    size = float(weights @ np.square(away))
    if not size > 0:
        return 0.0
    slope = float((weights * away) @ values) / size
    left = values - weights @ values - slope * away
    # robust to errors of different sizes (White, Econometrica 48, 1980)
    variance = float(np.square(weights * away * left).sum()) / size**2
    return slope * max(0.0, 1.0 - variance / slope**2) if slope else 0.0
