"""Direct readout: the influence of single chunks in gate space, from their own gradients.

What `measure_linear` says of a subset is the mean of what these say of its chunks, so that recovery is not
needed; but each chunk costs a forward and a backward pass for every query.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import TYPE_CHECKING

import numpy as np
import torch

from stride_cli.errors import UsageError
from stride_cli.operators.gates import gate_responses
from stride_cli.operators.gradients import gradient_products, joined
from stride_cli.operators.linear_response import gradients_with_loss
from stride_cli.output import progress

if TYPE_CHECKING:
    from stride_cli.attribution.shared_pairs import PairScores
    from stride_cli.data.batches import Batch, ChunkReader
    from stride_cli.data.query_set import QuerySet
    from stride_cli.data.workspace import Workspace
    from stride_cli.operators.projections import AskedProjections
    from stride_cli.operators.steered_model import SteeredModel
    from stride_cli.operators.store import Operators
    from stride_cli.recovery.refinement import Chosen

_ROWS = 1 << 18  # chunks whose estimates are made together
# of more chunks than these, means and spreads of estimates are those of so many, in stretches all over the
# corpus: another pass over all projections would change them by a fifth of a percent
_SCANNED_TWICE, _SAMPLED, _STRETCH = 1 << 20, 1 << 18, 1 << 12
_ROUNDING = 1e-7  # a spread that is smaller, beside what it is of, is none


def query_gradients(steered: SteeredModel, batches: Sequence[Batch]) -> list[torch.Tensor]:
    """Gate gradients of queries, one (Q, p) float32 on the CPU a space."""
    found = [gradients_with_loss(steered, batch)[0] for batch in batches]
    return [joined(parts) for parts in zip(*found, strict=True)]


def direct_scale(operators: Operators) -> float:
    """Factor of a chunk's gate gradient in the unit of the gates.

    Raises
    ------
    UsageError      the operators' gates are not what single chunks' gradients add up to
    """
    if operators.direct_scale is None:
        raise UsageError(
            "--read reads single chunks in the gates' own units, which these operators do not have",
            fix="fit a language model's operators by the default, in closed form with Kronecker factors "
            "(stride train --overwrite), or read none (--read 0)",
        )
    return operators.direct_scale


@dataclass(frozen=True)
class Projected:
    """What one model's projections say of every chunk, and how it counts among second estimates.

    Attributes
    ----------
    asked : AskedProjections
    means, spreads : (Q,) float64      of estimates / √step over the chunks that are projected, or, where
        these are many, a sample of them
    """

    asked: AskedProjections
    means: np.ndarray
    spreads: np.ndarray
    # of the query and range that were asked for last: several guides look at one range after the other
    _last: dict[tuple[int, int, int], np.ndarray] = field(default_factory=dict, repr=False, compare=False)

    def __len__(self) -> int:
        return len(self.asked.projections)

    def standard(self, query: int, rows: slice | np.ndarray) -> np.ndarray:
        """Estimates / √step of one query at mean 0 and variance 1: of a range of projected chunks, or of the
        given ones; float64, not to be written to."""
        if not isinstance(rows, slice):
            return self._of(query, self.asked.of(query, rows), rows)
        key = query, int(rows.start), int(rows.stop)
        if (found := self._last.get(key)) is None:
            found = self._of(query, self.asked.estimates(*key[1:], slice(query, query + 1))[0], rows)
            self._last.clear()
            self._last[key] = found
        return found  # not as kept: another thread may have asked for something else by now

    def _of(self, query: int, estimates: np.ndarray, rows: slice | np.ndarray) -> np.ndarray:
        step = self.asked.projections.step[rows]
        standard: np.ndarray = (_evened(estimates, step) - self.means[query]) / self.spreads[query]
        return standard


def _evened(estimates: np.ndarray, step: np.ndarray) -> np.ndarray:
    """Estimates / √step, float64; 0 where the step is."""
    size = np.sqrt(np.asarray(step))
    found: np.ndarray = estimates.astype(np.float64)
    np.divide(found, size, out=found, where=size > 0)
    return found


@dataclass(frozen=True)
class SecondEstimates:
    """What says, beside the recovery, which chunks are worth a direct look.

    All are of n chunks, computed part by part as they are asked for: of a corpus of 10⁸ each were 800 MB.

    Attributes
    ----------
    n_chunks : n
    pairs : PairScores or None      what chunks share with the Q queries
    projected : of each model with projections, in order, its part
    spread, together : (Q,) float64      what the sum of projections is divided by, and, where there are
        pairs, the sum of both
    varied : (Q,) bool              whether projections tell chunks apart
    """

    n_chunks: int
    pairs: PairScores | None
    projected: list[Projected]
    spread: np.ndarray
    together: np.ndarray
    varied: np.ndarray

    def guide(self, query: int) -> QueryEstimates:
        """Both together, of one query, at mean 0 and variance 1 (0 where all are equal)."""
        return QueryEstimates(self, query)

    def alone(self, query: int) -> QueryEstimates | None:
        """Likewise, projections by themselves, whose errors are known; None where there are none."""
        return QueryEstimates(self, query, alone=True) if self.projected else None

    @property
    def values(self) -> np.ndarray:
        """All of `guide`, (Q, n) float64: of a corpus that is not large."""
        return np.stack([self.guide(query)[:] for query in range(len(self.together))])

    def odds(self, query: int, chosen: Chosen, exact: Sequence[np.ndarray]) -> np.ndarray | None:
        """How likely each chunk that was read was to be, over the errors of the projections.

        Parameters
        ----------
        query : its number
        chosen : with projections guiding half of the choice
        exact : of each model with projections, (t,): scored_i g_i · g_q as read

        Returns
        -------
        ndarray (t,) float64, 0 … 1; None where nothing is known of errors: there are no projections, or not
        of all chunks
        """
        if not self.projected or any(len(part) < self.n_chunks for part in self.projected):
            return None
        from scipy.special import ndtr  # takes a tenth of a second to import

        odds = np.zeros(len(chosen.chunks))
        for guide, margins in enumerate(chosen.margins):
            # the strength that exact numbers would have had, and how far errors take it from there
            spare, variance = margins.copy(), np.zeros(len(odds))
            for part, products in zip(self.projected, exact, strict=True):
                # estimates / √step count times this
                weight = 1.0 / (part.spreads[query] * self.spread[query])
                if guide:
                    weight /= self.together[query]
                step = np.asarray(part.asked.projections.step[chosen.chunks])
                size = np.sqrt(step.astype(np.float64))
                error = products - part.asked.of(query, chosen.chunks)
                spare += weight * np.divide(error, size, out=np.zeros_like(size), where=size > 0)
                variance += np.square(weight * float(part.asked.noise[query]) * size)
            # errors are the same for every guide: a chunk is read where the kindest of them would
            certain, spread = np.where(spare > 0, np.inf, -np.inf), np.sqrt(variance)
            odds = np.maximum(odds, ndtr(np.divide(spare, spread, out=certain, where=spread > 0)))
        return odds


class QueryEstimates:
    """Second estimates of one query, part by part: a range of chunks, or given ones, float64.

    Parameters
    ----------
    found : SecondEstimates
    query : its number
    alone : by projections alone
    """

    def __init__(self, found: SecondEstimates, query: int, *, alone: bool = False) -> None:
        self._found, self._query = found, query
        self._pairs = None if alone or found.pairs is None else found.pairs.of(query)

    def __len__(self) -> int:
        return self._found.n_chunks

    def __getitem__(self, rows: slice | np.ndarray, /) -> np.ndarray:
        query = self._query
        if isinstance(rows, slice):
            start, stop, _ = rows.indices(len(self))
            rows, values = slice(start, stop), np.zeros(stop - start)
            for part in self._found.projected:  # chunks appended later have no projection: the mean
                last = max(start, min(stop, len(part)))
                values[: last - start] += part.standard(query, slice(start, last))
        else:
            values = np.zeros(len(rows))
            for part in self._found.projected:
                known = rows < len(part)
                values[known] += part.standard(query, rows[known])
        values /= self._found.spread[query]
        if self._pairs is not None:
            values += self._pairs.standard(rows)
            values /= self._found.together[query]
        return values


def projected_influences(
    models: Iterable[SteeredModel], batches: Sequence[Batch], n_chunks: int
) -> SecondEstimates | None:
    """Estimates of every chunk's influence from its projection.

    The error of an estimate is as large as the chunk's gradient. Estimates are divided by the root of that:
    halfway to units of their errors the 100 highest hold more of the 50 strongest chunks (instructions: .43
    for .37 at 512 bytes a chunk) and as many of the 10 strongest.

    Parameters
    ----------
    models : with their operators
    batches : the Q queries, in order
    n_chunks : n                    chunks appended later have no projection: 0, the mean

    Returns
    -------
    SecondEstimates                 the mean over the models that have projections; None where none has
    """
    asked = [
        steered.operators.projections.asked(query_gradients(steered, batches))
        for steered in models
        if steered.operators.projections is not None
    ]
    if not asked:
        return None
    parts, spread = _standardised(asked, n_chunks)
    varied = spread > 0.0
    return SecondEstimates(n_chunks, None, parts, np.where(varied, spread, 1.0), np.ones_like(spread), varied)


def _standardised(asked: Sequence[AskedProjections], n_chunks: int) -> tuple[list[Projected], np.ndarray]:
    """Models' projections with the means and spreads of their estimates / √step, and the spread of their sum
    over all n chunks, by one pass over them, or, where they are many, over a sample."""
    count, models = len(asked[0].units), len(asked)
    sums = np.zeros((models, models, count))  # of the first's, over the chunks that both have
    products = np.zeros((models, models, count))
    sizes = np.array([len(each.projections) for each in asked])
    most = int(sizes.max())
    seen = np.zeros(models)  # chunks of each
    for start, end in _stretches(most):
        found = []
        for each, size in zip(asked, sizes.tolist(), strict=True):
            stop = max(start, min(end, size))
            found.append(_evened(each.estimates(start, stop), each.projections.step[start:stop]))
        seen += [part.shape[1] for part in found]
        for first, second in product(range(models), repeat=2):
            shared = min(found[first].shape[1], found[second].shape[1])
            mine, others = found[first][:, :shared], found[second][:, :shared]
            sums[first, second] += mine.sum(axis=1)
            products[first, second] += np.einsum("qn,qn->q", mine, others)
    both = np.maximum(1, np.minimum(seen[:, None], seen))[:, :, None]  # chunks of a pair of models
    own = np.arange(models)
    means = sums[own, own] / both[own, own]
    spreads = np.sqrt(np.maximum(0.0, products[own, own] / both[own, own] - np.square(means)))
    spreads[spreads <= _ROUNDING * np.abs(means)] = 1.0  # all are equal
    # Σ_i z_i z'_i of standardised estimates z = (u − m) / s
    shared_products = (
        products
        - means[:, None] * np.swapaxes(sums, 0, 1)
        - means[None] * sums
        + both * means[:, None] * means[None]
    ) / (spreads[:, None] * spreads[None])
    # of all n chunks as many as of those that are projected
    looked_at = n_chunks * seen.max() / max(1, most)
    spread = np.sqrt(np.maximum(0.0, shared_products.sum(axis=(0, 1)) / max(1, looked_at)))
    spread[spread <= _ROUNDING] = 0.0
    parts = [Projected(each, *found) for each, *found in zip(asked, means, spreads, strict=True)]
    return parts, spread


def scans(n_chunks: int) -> float:
    """How often a query scans projections of so many chunks: for means and spreads, and to choose."""
    return 1.0 + (1.0 if n_chunks <= _SCANNED_TWICE else _SAMPLED / n_chunks)


def _stretches(count: int) -> Iterator[tuple[int, int]]:
    """Ranges of the chunks of which means and spreads are taken: of all, or of stretches evenly spaced."""
    if count <= _SCANNED_TWICE:
        for start in range(0, count, _ROWS):
            yield start, min(start + _ROWS, count)
        return
    for start in np.linspace(0, count - _STRETCH, _SAMPLED // _STRETCH).astype(int).tolist():
        yield start, start + _STRETCH


def second_estimates(
    models: Iterable[SteeredModel],
    queries: QuerySet,
    batches: Sequence[Batch],
    workspace: Workspace,
) -> SecondEstimates:
    """The pairs of tokens that chunks share with queries, and projections, where the operators have them.

    Projections also stand alone: by them what is strong is found however few pairs it shares and whatever the
    recovery makes of it, which is what statements about recall rest on.

    Parameters
    ----------
    models : with their operators
    queries : Q queries
    batches : the same, in order
    workspace : the n chunks, in the model's vocabulary
    """
    from stride_cli.attribution.shared_pairs import pair_scores

    pairs = pair_scores(queries, workspace.chunks, workspace.model.vocab_size)
    projected = projected_influences(models, batches, workspace.n_chunks)
    if projected is None:
        same = np.ones(len(queries))
        return SecondEstimates(workspace.n_chunks, pairs, [], same, same, np.zeros(len(queries), bool))
    together = np.empty(len(queries))
    for query in range(len(queries)):
        own, others = pairs.of(query), projected.guide(query)
        # of a sum of two of mean 0; of pairs all but a few chunks have the same number, which drops out
        covariance = float(own.scores @ others[own.chunks]) / own.spread / max(1, workspace.n_chunks)
        variances = float(own.varied) + float(projected.varied[query])
        together[query] = np.sqrt(max(0.0, variances + 2.0 * covariance))
    together[together <= _ROUNDING] = 1.0
    return replace(projected, pairs=pairs, together=together)


@dataclass(frozen=True)
class InfluenceUnit:
    """What products of gradients come to as influences, in the unit of the recovered ones.

        w_i = Σ_c a_c P_ci − b,      P_ci = scored_i g_i · g_x in model c
        a_c = f_c / (C m̄_c typical λ_stab)

    f_c puts the responses of model c on the scale of the first one's, m̄_c is its subsets' mean size, and b,
    which the subsets' responses tell, the mean over all chunks; see `additive_measurement`.

    Attributes
    ----------
    factors : (C, Q) float64      a
    offset : (Q,) float64         b; 0 where the recovery fits no intercept
    """

    factors: np.ndarray
    offset: np.ndarray

    def influences(self, products: Sequence[np.ndarray]) -> np.ndarray:
        """(Q, t) of the products of each model, C of (Q, t)."""
        total = np.zeros(products[0].shape)
        for factor, own in zip(self.factors, products, strict=True):
            total += factor[:, None] * own
        return total - self.offset[:, None]


@dataclass(frozen=True)
class Readout:
    """Chunks as their own gradients say.

    Attributes
    ----------
    influences : (Q, t) float64
    products : of each model, (Q, t) float64      scored_i g_i · g_q
    unit : InfluenceUnit                          what turns one into the other, also those of other chunks
    """

    influences: np.ndarray
    products: list[np.ndarray]
    unit: InfluenceUnit


def chunk_influences(
    models: Iterable[SteeredModel],
    batches: Sequence[Batch],
    chunks: ChunkReader,
    rows: np.ndarray | Sequence[np.ndarray],
    responses: np.ndarray,
    row_sizes: np.ndarray,
    *,
    intercept: bool = True,
) -> Readout:
    """Influences of the given chunks, in the unit of the recovered ones: see `InfluenceUnit`.

    Parameters
    ----------
    models : with their operators, the index's own first
    batches : the Q queries, in order
    rows : (t,) int64               distinct chunks; or Q of these, of each query its own: the t that are read
                                    are then all of them, ascending. None may be asked for
    responses : (Q, C K) float64    of `stack_checkpoints`
    row_sizes : (K,) or (C, K)      |A_k|
    intercept : bool                whether recovery fits one; without, b is 0

    Raises
    ------
    UsageError      the operators' gates are not what single chunks' gradients add up to
    """
    if not isinstance(rows, np.ndarray):
        rows = np.unique(np.concatenate(rows))
    sizes = np.atleast_2d(np.asarray(row_sizes, np.float64))
    factors, offset = np.zeros((len(sizes), len(responses))), np.zeros(len(responses))
    read: list[np.ndarray] = []
    for number, steered in enumerate(models):
        operators = steered.operators
        scale = direct_scale(operators)
        asked = query_gradients(steered, batches)
        own = np.asarray(responses)[:, number * operators.n_subsets : (number + 1) * operators.n_subsets]
        if len(rows):
            with progress("reading chunks", len(rows), unit="chunks") as bar:
                found = gradient_products(steered, asked, chunks, rows, advance=bar.advance)
            read.append(chunks.typical * found.sum(axis=0))
        else:
            read.append(np.zeros((len(responses), 0)))
        factor = np.ones(len(responses))
        if number:  # the others' responses were put on the scale of the first model's
            raw = sum(
                gate_responses(gates, query.numpy())
                for gates, query in zip(operators.gates, asked, strict=True)
            )
            spread = np.std(raw, axis=1)
            factor = np.divide(np.std(own, axis=1), spread, out=np.zeros_like(factor), where=spread > 0)
        mean_size = max(1.0, sizes[number].mean()) * len(sizes)
        factors[number] = scale * factor / (chunks.typical * mean_size)
        if intercept:
            offset += (own * sizes[number]).sum(axis=1) / max(1.0, sizes[number].sum()) / mean_size
    unit = InfluenceUnit(factors, offset)
    return Readout(unit.influences(read), read, unit)
