"""From queries to influences: once for `stride query`, evaluation and audit.

    measure → estimate → read (exact gradients of the likeliest) → recover

`Session` ranks documents by them, and holds answers against those to null prompts.

What is shown is the minimiser of one convex problem (`recovery.lasso`):

    min over w, c   ½‖y − c − M w‖² + λ Σ_i ω_i |w_i − μ_i|      (w_i = exact value where there is one)

It is solved without exact values first, which says of which chunks they are worth taking, and then with them.
Zero is no effect: the average chunk's, which y leaves out and c takes, is added back. In pre-training alone,
small differences from it are made smaller at the end (`recovery.shrinkage`).

The pipeline is for one steered model; `attribution.several` averages the runs of several.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from stride_cli.attribution.options import RecoveryOptions
from stride_cli.errors import NumericalError, UsageError
from stride_cli.parallel import available_bytes
from stride_cli.recovery.problem import LassoSettings, Solution

if TYPE_CHECKING:
    import torch

    from stride_cli.attribution.direct import Exact
    from stride_cli.attribution.estimates import Estimate
    from stride_cli.data.batches import Batch
    from stride_cli.data.query_set import QuerySet
    from stride_cli.data.workspace import Workspace
    from stride_cli.operators.steered_model import SteeredModel
    from stride_cli.operators.store import Operators
    from stride_cli.recovery.shrinkage import Shrinkage

_MOST_TOGETHER, _VALUES = 320, 1 << 27  # queries, and numbers of either kind for all of them
_MOST_KEPT = 1 << 17  # influences of a query that are kept, the largest against the average chunk's
_OF_QUERIES = ("responses", "y", "average", "losses")  # what a `Measurement` has of each query
_NONE = np.empty(0, np.int64)  # of the chunks
_OF_MEMORY = 16  # the share of memory that their gradients may take where that is more: 1/16, twice


@dataclass(frozen=True)
class Settings:
    """`RecoveryOptions` resolved for an index and its operators.

    Attributes
    ----------
    method : "linear" or "exact"       how queries are measured
    batch_size : int                   steered continuations at once (exact)
    lasso : LassoSettings
    reads : int                        candidates of each query, of which exact gradients are taken
    estimated : bool                   projections and pairs say what is expected of every chunk
    redundancy : float                 ridge, in chunks, with which near-duplicates share credit; 0: none
    shrinkage : Shrinkage or None      how small differences from the average chunk are made smaller
    models : int                       whose runs are averaged
    """

    method: str
    batch_size: int
    lasso: LassoSettings
    reads: int
    estimated: bool
    redundancy: float
    shrinkage: Shrinkage | None
    models: int = 1

    @classmethod
    def resolve(
        cls,
        options: RecoveryOptions,
        defaults: dict[str, Any],
        workspace: Workspace,
        operators: Sequence[Operators],
    ) -> Settings:
        """Take what options say, and defaults where they say nothing.

        Parameters
        ----------
        defaults : of `stride_cli.attribution.defaults.recovery_defaults`
        operators : of all models

        Raises
        ------
        UsageError      a ridge is given, and chunks are not estimated
        """
        from stride_cli.attribution.defaults import default_reads

        def chosen(name: str, own: Any, unset: Any = None) -> Any:
            return defaults[name] if own == unset else own

        # estimates need a projection of every chunk, whose error is known in the gates' unit
        in_unit = all(own.direct_scale is not None for own in operators)
        kept = (len(own.projections) if own.projections is not None else 0 for own in operators)
        estimated = options.estimate == "auto" and in_unit and min(kept) >= workspace.n_chunks
        if options.redundancy and not estimated:
            raise UsageError(
                "query.redundancy needs a projection of every chunk, and to estimate by it",
                fix="leave out query.redundancy and query.estimate, or stride train --project 8192",
            )
        # 0 where they would take too long, or where gates have no unit for single chunks
        usual = default_reads(workspace, len(operators)) if in_unit else 0
        return cls(
            method=chosen("measure", options.measure, "auto"),
            batch_size=options.batch_size,
            lasso=LassoSettings(
                defaults["estimated_lambda_ratio" if estimated else "lambda_ratio"]
                if options.lambda_ratio is None
                else options.lambda_ratio,
                bool(chosen("intercept", options.intercept)),
                options.nonneg,
            ),
            reads=min(usual if options.read is None else options.read, workspace.n_chunks),
            estimated=estimated,
            redundancy=float(chosen("redundancy", options.redundancy)) if estimated else 0.0,
            shrinkage=defaults["shrinkage"] if options.shrink else None,
            models=len(operators),
        )

    @property
    def looks_at_chunks(self) -> bool:
        """False where influences are the Lasso's alone."""
        return bool(self.reads) or self.estimated

    def like(self, other: Settings) -> bool:
        """Tell whether influences are the same, up to how exactly they are measured and read."""
        # not method and reads: more exact ones measure the same
        same = replace(other, method=self.method, reads=self.reads, batch_size=self.batch_size)
        return replace(same, models=self.models) == self


@dataclass(frozen=True)
class Measurement:
    """The answers of K subsets to Q queries, y, and the design that explains them, M.

    Attributes
    ----------
    columns : (n, d) unsigned       the subsets of each chunk: M by its columns
    responses : (Q, K) float64      nats; positive where steering towards the subset lowers the loss
    y : (Q, K) float64              the same as M w explains it, w against the average chunk's influence:
                                    `additive_measurement`; as they are where no intercept is fitted
    average : (Q,) float64          that influence, in the unit of w; 0 where no intercept is fitted
    losses : (Q,) float64           mean nats per scored token
    fitted : int                    chunks that subsets answer for, the first; others were appended since
    scale : (Q,) float64 or float   what responses were multiplied by; of C models (C, Q)
    """

    columns: Any
    responses: np.ndarray
    y: np.ndarray
    average: np.ndarray
    losses: np.ndarray
    fitted: int
    scale: Any = 1.0

    def take(self, rows: slice | np.ndarray) -> Measurement:
        """Return the measurement of some queries."""
        scale = self.scale[..., rows] if isinstance(self.scale, np.ndarray) else self.scale
        own: dict[str, Any] = {name: getattr(self, name)[rows] for name in _OF_QUERIES}
        return replace(self, **own, scale=scale)

    def of_query(self, query: int) -> Measurement:
        """Return the measurement of one query."""
        return self.take(slice(query, query + 1))

    @classmethod
    def stacked(cls, measured: Sequence[Measurement]) -> Measurement:
        """Join measurements of several queries."""
        first, scale = measured[0], measured[0].scale
        if isinstance(scale, np.ndarray):
            scale = np.concatenate([each.scale for each in measured], axis=-1)
        joined: dict[str, Any] = {
            name: np.concatenate([getattr(each, name) for each in measured]) for name in _OF_QUERIES
        }
        return replace(first, **joined, scale=scale)


def _mean_response(responses: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """The mean over members and not over subsets, s̄: of responses (..., K) and |A_k| (K,), float64."""
    # a corpus that is smaller than the design may leave every subset empty
    return (responses * sizes).sum(axis=-1) / max(1.0, float(sizes.sum()))


def average_influence(responses: np.ndarray, row_sizes: np.ndarray) -> np.ndarray:
    """The average chunk's influence, s̄ / m̄: of responses (..., K) and |A_k| (K,), float64."""
    sizes = np.asarray(row_sizes, dtype=np.float64)
    return _mean_response(responses, sizes) / max(1.0, float(sizes.mean()))


def additive_measurement(responses: np.ndarray, row_sizes: np.ndarray) -> np.ndarray:
    """Put responses on the scale of subset sums, so that y ≈ M w holds row by row.

    An operator fitted on the *mean* gradient of its subset answers with the mean of its chunks' influences,
    ``ȳ_k = (1/|A_k|) Σ_{i∈A_k} s_i``, whereas eq:linsys asks for a sum. Rows of a left-regular design
    differ in size; scaling the centred responses by ``|A_k| / mean size`` makes them sums again:

        y_k = |A_k| / m̄ · (ȳ_k − ȳ),     w_i = (s_i − s̄) / m̄

    Parameters
    ----------
    responses : (..., K) float64, as what comes back is
    row_sizes : (K,)      |A_k|
    """
    sizes = np.asarray(row_sizes, dtype=np.float64)
    if sizes.sum() == 0:  # all subsets are empty
        return np.asarray(responses, dtype=np.float64)
    mean = _mean_response(responses, sizes)[..., None]
    return (responses - mean) * (sizes / sizes.mean())


def queries_together(n_chunks: int, gate_size: int, device: torch.device) -> int:
    """Return how many queries are asked at once: see `Pipeline.together`.

    Chunks are read once for all of them, so that few at a time are many passes: as many as have room. What
    is free of memory counts as a power of two, or the last digits would depend on what else runs.
    """
    from stride_cli.models.devices import total_bytes

    # gradients are in memory, and on a GPU too
    free = min((size for size in (total_bytes(device), available_bytes()) if size), default=0)
    room = max(2 * _VALUES, (1 << free.bit_length() >> 1) // _OF_MEMORY)
    return max(1, min(_MOST_TOGETHER, _VALUES // max(1, n_chunks), room // (4 * max(1, gate_size))))


@dataclass(frozen=True)
class Pipeline:
    """One steered model, its design, and how it is asked.

    Attributes
    ----------
    load : callable             → the model with its operators; called when it is first needed
    columns : (n, d) unsigned   the subsets of each chunk: M by its columns
    row_sizes : (K,) int64      |A_k|
    workspace : Workspace       the index, its own model, its chunks
    settings : Settings
    together : int              queries whose influences of all chunks, and whose gradients, may be in memory
                                at once
    """

    load: Callable[[], SteeredModel]
    columns: Any
    row_sizes: np.ndarray
    workspace: Workspace
    settings: Settings
    together: int

    @cached_property
    def steered(self) -> SteeredModel:
        return self.load()

    # ---- 1. measure ----

    def measure(
        self, batches: Sequence[Batch], *, gather: Callable[[np.ndarray], np.ndarray] = lambda rows: rows
    ) -> Measurement:
        """Measure how the subsets answer queries.

        Parameters
        ----------
        batches : the queries, or parts of them
        gather : callable, optional      responses (R, K) or losses (R,) of the parts → of the Q queries

        Raises
        ------
        QueryError          a query is longer than the model's context
        NumericalError      a response or loss is not finite
        """
        from stride_cli.operators.exact_response import paper_measurement
        from stride_cli.operators.linear_response import measure_linear_with_loss

        found, losses = [], []
        # 1. Batch by batch; parts of a query may lie in several
        for batch in batches:
            responses, loss = measure_linear_with_loss(self.steered, batch)
            if self.settings.method == "exact":
                size = self.settings.batch_size
                responses = paper_measurement().measure_exact(self.steered, batch, batch_size=size)
            found.append(responses)
            losses.append(loss)
        # 2. Parts make queries
        responses, loss = gather(np.concatenate(found)), gather(np.concatenate(losses))
        # refused before anything is made of it, with what helps
        if not (np.isfinite(responses).all() and np.isfinite(loss).all()):
            raise NumericalError(
                "a measured response or loss is not finite",
                fix="run with --dtype fp32, or fit the operators anew",
            )
        # 3. y, in which the Lasso explains them
        y, average = self.explained(responses)
        return Measurement(self.columns, responses, y, average, loss, len(self.steered.operators.seen))

    def explained(self, responses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return y of responses (Q, K), and the average chunk's influence that it leaves out, (Q,)."""
        if not self.settings.lasso.intercept:
            return responses, np.zeros(len(responses))
        sizes = self.row_sizes
        return additive_measurement(responses, sizes), average_influence(responses, sizes)

    # ---- 2. estimate → 3. read → 4. recover ----

    def influences(
        self,
        queries: QuerySet | None,
        batches: Sequence[Batch],
        measurement: Measurement,
        *,
        shrink: bool = True,
        reached: Callable[[str], None] = lambda stage: None,
    ) -> list[Solution]:
        """Find the influences of all chunks on each query: the minimisers of the problem.

        Parameters
        ----------
        queries : Q queries               only looked at where `Settings.looks_at_chunks`
        batches : the same, in order      likewise
        measurement : of these queries
        shrink : make small ones smaller (`Settings.shrinkage`)
        reached : callable, optional      told "recover" once chunks are selected, "read" at the end

        Raises
        ------
        NumericalError      see `solve_lasso`
        UsageError          chunks are to be read, and the operators do not allow it (`direct_scale`)
        """
        from stride_cli.recovery.candidates import likeliest
        from stride_cli.recovery.lasso import solve_batch
        from stride_cli.recovery.shrinkage import shrink_solution

        settings = self.settings
        n_chunks, n_subsets = self.workspace.n_chunks, measurement.y.shape[1]
        # 1. Nothing is known of single chunks: the paper's Lasso, of many queries at once
        if not settings.looks_at_chunks and not settings.lasso.nonneg and measurement.fitted == n_chunks:
            lassos = solve_batch(self.columns, measurement.y, settings.lasso, n_subsets=n_subsets)
            reached("recover")
            plain = [shown(each, measurement.of_query(at), settings) for at, each in enumerate(lassos)]
            return [shrink_solution(each, settings.shrinkage) if shrink else each for each in plain]
        assert queries is not None or not settings.looks_at_chunks
        # 2. What is expected of every chunk
        estimates, batches = self.estimate(queries, batches, measurement)
        exact = self.read([_NONE] * len(estimates), batches, measurement)

        def recovered() -> Iterator[Solution]:
            for query, estimate in enumerate(estimates):
                yield recover(measurement.of_query(query), estimate, exact[query], settings)

        # 3. Exact gradients of the likeliest, by what all this says together, in one pass for all queries
        chosen = [np.arange(n_chunks)] * len(estimates)
        if 0 < settings.reads < n_chunks:
            chosen = [likeliest(self.columns, found, settings.reads) for found in recovered()]
        reached("recover")
        if settings.reads:
            exact = self.read(chosen, batches, measurement)
        # 4. What the three say together, query by query
        solutions = list(recovered())
        if not all(np.isfinite(each.values).all() for each in solutions):
            raise NumericalError(
                "the influence of a chunk that was read is not finite",
                fix="run with --dtype fp32 or --read 0, or fit the operators anew",
            )
        reached("read")
        return [shrink_solution(each, settings.shrinkage) if shrink else each for each in solutions]

    def estimate(
        self, queries: QuerySet | None, batches: Sequence[Batch], measurement: Measurement
    ) -> tuple[Sequence[Estimate | None], Sequence[Batch]]:
        """Estimate every chunk's influence from projections and shared pairs, without reading any.

        Returns
        -------
        of each query, its estimate, None without projections; and the batches, which remember the queries'
        gradients where these fit
        """
        from stride_cli.attribution.direct import direct_scale
        from stride_cli.attribution.estimates import Estimate
        from stride_cli.data.batches import RememberingBatch

        count = len(measurement.y)
        if not self.settings.looks_at_chunks:
            return [None] * count, batches
        assert queries is not None
        direct_scale(self.steered.operators)  # or an error, before anything is read
        if count <= self.together:  # asked for by the projections, and again by the reading
            batches = [RememberingBatch.of(batch) for batch in batches]
        if not self.settings.estimated:
            return [None] * count, batches
        return Estimate.of(self.steered, queries, batches, self.workspace), batches

    def read(
        self, chosen: Sequence[np.ndarray], batches: Sequence[Batch], measurement: Measurement
    ) -> list[Exact]:
        """Take exact gradients of each query's candidates, all in one pass over these."""
        from stride_cli.attribution.direct import Exact, exact_products, influence_unit

        if not self.settings.looks_at_chunks:
            return [Exact(own, np.empty(0), 0.0, 0.0) for own in chosen]
        chunks = self.workspace.chunks
        # queries share most of their candidates: each chunk goes through the model once for all of them
        rows = np.unique(np.concatenate(chosen))
        products = np.empty((len(chosen), 0))
        if len(rows):
            products = exact_products(self.steered, batches, chunks, rows)
        # P is a product of gradients; w = a P − b is in the unit of the problem's weights
        unit = influence_unit(self.steered.operators, self.workspace, self.row_sizes)
        factors = np.broadcast_to(unit * measurement.scale, len(chosen))
        return [
            Exact(
                own, products[query, np.searchsorted(rows, own)], factors[query], measurement.average[query]
            )
            for query, own in enumerate(chosen)
        ]

    def parts(self, measurement: Measurement) -> Iterator[tuple[Pipeline, Measurement]]:
        """Each model's pipeline with its part of a measurement: this one's."""
        yield self, measurement


def recover(
    measurement: Measurement, estimate: Estimate | None, exact: Exact, settings: Settings
) -> Solution:
    """Recover the influences of all chunks on one query: see the head of this module.

    Parameters
    ----------
    measurement : Measurement        of the query
    estimate : Estimate or None      of every chunk; None: nothing is expected of one more than of another
    exact : Exact                    of some chunks; of none, one or all
    settings : Settings

    Returns
    -------
    Solution      with the certificate of the problem; `recall` where chunks were read and others estimated
    """
    from stride_cli.recovery.lasso import solve_lasso
    from stride_cli.recovery.problem import Prior
    from stride_cli.recovery.recall import TOP, stated_recall
    from stride_cli.recovery.screening import Design

    columns, (y,), own, fitted = measurement.columns, measurement.y, exact.chunks, measurement.fitted
    n_chunks = len(columns)
    # 1. μ and τ, against the average chunk
    posteriors = None
    if estimate is not None:
        posteriors = estimate.given(exact, settings.redundancy)
        prior = posteriors.prior
        if posteriors.shared is not None:
            shared = posteriors.shared[0:n_chunks]
            shared[fitted:] = 0.0  # subsets answer without chunks that were appended
            y = y - Design(columns, len(y)).sums(shared)
    else:
        prior = Prior(np.zeros(n_chunks), np.ones(n_chunks))
        prior.means[own], prior.spreads[own] = exact.influences, 0.0
    # 2. Where none may be below zero, zero has to be in sight: the average chunk is put back before
    lasso = replace(settings.lasso, nonneg=settings.lasso.nonneg and not settings.looks_at_chunks)
    average = float(measurement.average[0])
    if lasso.nonneg and average:
        y = y + average * Design(columns, len(y)).sums((np.arange(n_chunks) < fitted).astype(float))
        prior = Prior(prior.means + average, prior.spreads)
    # 3. The one problem. Chunks that were appended keep what is expected of them, and y − M μ is without them
    if fitted < n_chunks:
        appended = np.arange(n_chunks) >= fitted
        y = y + Design(columns, len(y)).sums(prior.means * appended)
        prior = Prior(prior.means, np.where(appended, 0.0, prior.spreads))
    solution = solve_lasso(columns, y, lasso, n_subsets=len(y), prior=prior)
    # 4. How many of the strongest were read
    recall = None
    if posteriors is not None and settings.reads and len(own):
        strongest = np.sort(posteriors.exact.influences)[::-1]
        recall = stated_recall(strongest, posteriors.expected_above(strongest[:TOP]), n_chunks)
    found = shown(solution, measurement, settings, own, np.flatnonzero(prior.spreads == 0))
    return replace(found, recall=recall)


def shown(
    solution: Solution,
    measurement: Measurement,
    settings: Settings,
    own: np.ndarray = _NONE,
    fixed: np.ndarray = _NONE,
) -> Solution:
    """Add the average chunk's influence to weights against it, and what the intercept takes out.

    c is what constant sums of influences leave of y; chunks whose weight is not fixed share it evenly.

    Parameters
    ----------
    solution : Solution        of the problem
    measurement : Measurement  of the query
    own, fixed : ascending     chunks that were read; and those whose weight no subset has a say in
    """
    columns, n_chunks = measurement.columns, solution.n_chunks
    if settings.lasso.nonneg and not settings.looks_at_chunks:
        return replace(solution, exact=own)  # it is there already, and c may not take anything below zero
    average, free = float(measurement.average[0]), n_chunks - len(fixed)
    share = solution.intercept * len(solution.residual) / (columns.shape[1] * free) if free else 0.0
    indices, values = solution.indices, solution.values
    # weights that happen to be zero are influences all the same
    if len(indices) < n_chunks and len(fixed):
        indices = np.union1d(indices, fixed)
        values = np.zeros(len(indices))
        values[np.searchsorted(indices, solution.indices)] = solution.values
    # of a large corpus the largest
    if len(indices) > _MOST_KEPT:
        kept = np.sort(np.argpartition(-np.abs(values), _MOST_KEPT)[:_MOST_KEPT])
        indices, values = indices[kept], values[kept]
    values = values + average + np.where(np.isin(indices, fixed, assume_unique=True), 0.0, share)
    least = 0.0 if settings.lasso.nonneg else -np.inf
    values, average = np.maximum(values, least), max(average + share, least)
    return replace(solution, indices=indices, values=values, average=average, exact=own)
