"""The pipeline from queries to influences, once: for `stride query`, the evaluation and the audit.

    measure → recover → read the likeliest chunks → estimate the others → shrink

What differs between them is around it: one query at a time or blocks of them, models that stay loaded or are
loaded one after the other, what is made of the influences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from stride_cli.attribution.options import RecoveryOptions
from stride_cli.errors import NumericalError, UsageError
from stride_cli.free_memory import available_bytes

if TYPE_CHECKING:
    import torch

    from stride_cli.attribution.direct_readout import SecondEstimates
    from stride_cli.attribution.estimated import Read, Responses
    from stride_cli.data.batches import Batch
    from stride_cli.data.query_set import QuerySet
    from stride_cli.data.workspace import Workspace
    from stride_cli.models.protocol import AttributableModel
    from stride_cli.operators.designs import Designs
    from stride_cli.operators.steered_model import SteeredModel
    from stride_cli.operators.store import Operators
    from stride_cli.recovery.problem import LassoSettings, Solution
    from stride_cli.recovery.recall import Recall
    from stride_cli.recovery.refinement import Chosen
    from stride_cli.recovery.shrinkage import Shrinkage

_MOST_TOGETHER, _VALUES = 320, 1 << 27  # queries, and numbers of either kind for all of them
_OF_MEMORY = 8  # the share of memory that their gradients may take where that is more: 1/8, twice


@dataclass(frozen=True)
class Measured:
    """What the subsets answered.

    Attributes
    ----------
    responses : (Q, C K) float64      of C models, nats of the first: see `stack_checkpoints`
    losses : (Q,) float64             of the first model, mean nats per scored token
    method : "linear" or "exact"
    agreement : float or None         see `measure_batch`; the lowest of all models'
    """

    responses: np.ndarray
    losses: np.ndarray
    method: str
    agreement: float | None


@dataclass(frozen=True)
class Attribution:
    """What the pipeline found for one query.

    Attributes
    ----------
    solution : Solution       of the Lasso; the certificate is of this
    influences : Solution     the same with the weights that documents are ranked by: read, estimated, shrunk
    read : (t,) int64         the chunks that were read, ascending
    estimated : bool          chunks that were not read have what their projections say, too
    recall : Recall or None   how many of the strongest chunks were read, where that can be told
    """

    solution: Solution
    influences: Solution
    read: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    recall: Recall | None = None
    estimated: bool = False

    def strongest(self, chunk_document: Any) -> float:
        """Influence of the document that supports most; 0 where none does. (n,) int64, mapped or not."""
        from stride_cli.recovery.ranking import document_influences

        influence = document_influences(self.influences, chunk_document)[1]
        return float(influence.max(initial=0.0))


def dense(found: Sequence[Attribution], dtype: type = np.float64) -> np.ndarray:
    """Influences of all chunks on each query, (Q, n)."""
    weights: np.ndarray = np.zeros((len(found), found[0].influences.n_chunks), dtype)
    for row, each in zip(weights, found, strict=True):
        row[each.influences.indices] = each.influences.values
    return weights


def queries_together(n_chunks: int, gate_size: int, device: torch.device) -> int:
    """How many queries are asked at once: see `Attributor.together`.

    Chunks are read once for all of them, so that few at a time are many passes: as many as have room. What
    is free of memory counts as a power of two, or the last digits would depend on what else runs.
    """
    from stride_cli.models.devices import total_bytes

    # gradients are in memory, and on a GPU too
    free = min((size for size in (total_bytes(device), available_bytes()) if size), default=0)
    room = max(4 * _VALUES, (1 << free.bit_length() >> 1) // _OF_MEMORY)
    return max(1, min(_MOST_TOGETHER, _VALUES // max(1, n_chunks), room // (4 * max(1, gate_size))))


@dataclass(frozen=True)
class Attributor:
    """Steered models, their designs, and how they are asked.

    Attributes
    ----------
    operators : of C models, the index's own first
    load : callable
        The number of a model → the model. Asked once a pass, so that one may be loaded after the other.
    designs : Designs             of all models
    workspace : Workspace         the index, its own model, its chunks
    defaults : dict               `stride_cli.attribution.defaults.recovery_defaults`
    options : RecoveryOptions
    """

    operators: Sequence[Operators]
    load: Callable[[int], AttributableModel]
    designs: Designs
    workspace: Workspace
    defaults: dict[str, Any]
    options: RecoveryOptions = field(default_factory=RecoveryOptions)

    def steered(self, *, projected: bool = False) -> Iterator[SteeredModel]:
        """Every model (or those with projections) with its operators, loaded as it is asked for."""
        from stride_cli.operators.steered_model import SteeredModel

        for number, operators in enumerate(self.operators):
            if operators.projections is not None or not projected:
                yield SteeredModel.of(self.load(number), operators)

    @property
    def intercept(self) -> bool:
        own = self.options.intercept
        return bool(self.defaults["intercept"] if own is None else own)

    @cached_property
    def reads(self) -> int:
        """How many chunks are read for each query."""
        from stride_cli.attribution.defaults import default_reads

        own = self.options.read
        count = default_reads(self.workspace, self.operators) if own is None else own
        return min(count, self.workspace.n_chunks)

    @cached_property
    def estimates(self) -> bool:
        """Whether chunks that are not read are estimated by their projections and the recovery together:
        where every model has its own of all chunks, of which the errors are known."""
        return self.options.estimate == "auto" and all(
            own.direct_scale is not None
            and own.projections is not None
            and len(own.projections) >= self.workspace.n_chunks
            for own in self.operators
        )

    @property
    def redundancy(self) -> float:
        """With which ridge chunks that say the same share what they explain; 0: they do not.

        Raises
        ------
        UsageError      it is asked for where chunks are not estimated
        """
        own = self.options.redundancy
        if own and not self.estimates:
            raise UsageError(
                "--redundancy needs a projection of every chunk, and to estimate by it",
                fix="leave out --redundancy and --estimate, or make projections: stride train --project 8192",
            )
        if not self.estimates:
            return 0.0
        return float(self.defaults["redundancy"] if own is None else own)

    @property
    def looks_at_chunks(self) -> bool:
        """Whether influences are not the recovery's alone."""
        return bool(self.reads) or self.estimates

    @cached_property
    def together(self) -> int:
        """Queries whose influences of all chunks, and whose gradients, may be in memory at once."""
        gate_size = sum(found.gate_size for found in self.operators)
        return queries_together(self.workspace.n_chunks, gate_size, self.workspace.model.device)

    @property
    def shrinkage(self) -> Shrinkage | None:
        """How influences are shrunk; None: not at all."""
        found: Shrinkage | None = self.defaults["shrinkage"] if self.options.shrink else None
        return found if found is None or self.looks_at_chunks else found.averaged(len(self.operators))

    @property
    def settings(self) -> LassoSettings:
        """Of the recovery."""
        from stride_cli.recovery.problem import LassoSettings

        ratio = self.options.lambda_ratio
        return LassoSettings(
            self.defaults["lambda_ratio"] if ratio is None else ratio, self.intercept, self.options.nonneg
        )

    @property
    def method(self) -> str:
        """How queries are measured: "linear" or "exact"."""
        own = self.options.measure
        return str(self.defaults["measure"]) if own == "auto" else own

    @property
    def like_default(self) -> bool:
        """Whether influences are what they are by default, up to how exactly they are measured and read."""
        default = replace(self, options=RecoveryOptions())
        same = self.settings == default.settings and self.estimates == default.estimates
        same = same and self.redundancy == default.redundancy
        return same and self.options.shrink

    def measure(
        self,
        batches: Sequence[Batch],
        *,
        check: np.ndarray | None = None,
        gather: Callable[[np.ndarray], np.ndarray] = lambda rows: rows,
    ) -> Measured:
        """Measure queries with every model, one model after the other.

        Parameters
        ----------
        batches : the queries, or parts of them
        check : (S,) int64, optional     subsets on which a linear measurement is compared with the exact one
        gather : callable, optional      responses (R, K) or losses (R,) of the parts → of the Q queries

        Raises
        ------
        QueryError          a query is longer than a model's context
        NumericalError      a response or loss is not finite
        """
        from stride_cli.attribution.measuring import measure_batch, stack_checkpoints

        method = self.method
        found: list[np.ndarray] = []
        losses: list[np.ndarray] = []
        agreements: list[float] = []
        for place, steered in enumerate(self.steered()):
            own = []
            for number, batch in enumerate(batches):
                responses, loss, agreement = measure_batch(
                    steered,
                    batch,
                    method=method,
                    batch_size=self.options.batch_size,
                    check=check if number == 0 else None,
                )
                own.append(responses)
                if place == 0:
                    losses.append(loss)
                if agreement is not None:
                    agreements.append(agreement)
            found.append(gather(np.concatenate(own)))
        sizes = self.designs.row_sizes if self.intercept else None
        measured = Measured(
            stack_checkpoints(found, sizes),
            gather(np.concatenate(losses)),
            method,
            min(agreements, default=None),
        )
        if not (np.isfinite(measured.responses).all() and np.isfinite(measured.losses).all()):
            raise NumericalError(
                "a measured response or loss is not finite",
                fix="run with --dtype fp32, or fit the operators anew",
            )
        return measured

    def explained(self, responses: np.ndarray) -> np.ndarray:
        """The responses as the recovery explains them by M w: on the scale of subset sums, or as they are
        where no intercept is fitted."""
        from stride_cli.attribution.additive import additive_measurement

        return additive_measurement(responses, self.designs.row_sizes) if self.intercept else responses

    def influences(
        self,
        queries: QuerySet | None,
        batches: Sequence[Batch],
        responses: np.ndarray,
        *,
        reached: Callable[[str], None] = lambda stage: None,
    ) -> list[Attribution]:
        """Influences of all chunks on each query.

        Parameters
        ----------
        queries : Q queries               only looked at where `looks_at_chunks`
        batches : the same, in order      likewise
        responses : (Q, C K) float64      of `measure`
        reached : callable, optional      told "recover" and "read" when that is done

        Raises
        ------
        NumericalError      see `solve_lasso`
        UsageError          chunks are to be read, and the operators do not allow it (`direct_scale`)
        """
        from stride_cli.recovery.several import solve_models

        _ = self.redundancy  # or an error
        solutions = solve_models(
            self.designs.each, self.explained(responses), self.settings, n_subsets=self.operators[0].n_subsets
        )
        reached("recover")
        if not self.looks_at_chunks:
            return self.unread(solutions)
        assert queries is not None
        found = self.read(queries, batches, responses, solutions)
        if not all(np.isfinite(each.influences.values).all() for each in found):
            raise NumericalError(
                "the influence of a chunk that was read is not finite",
                fix="run with --dtype fp32 or --read 0, or fit the operators anew",
            )
        reached("read")
        return found

    def path(self, responses: np.ndarray, lambda_ratios: Sequence[float]) -> list[list[Attribution]]:
        """`influences` for several λ / λ_max, each query going on from one to the next; nothing is read.

        Returns
        -------
        for each λ / λ_max, in the order given, a list of Q Attribution
        """
        from stride_cli.recovery.several import solve_models_path

        if self.options.read:
            raise UsageError("chunks are read at one λ, not along a path", fix="read none (read=0)")
        found = solve_models_path(
            self.designs.each,
            self.explained(responses),
            lambda_ratios,
            self.settings,
            n_subsets=self.operators[0].n_subsets,
        )
        return [self.unread(solutions) for solutions in found]

    def unread(self, solutions: Sequence[Solution]) -> list[Attribution]:
        """What the Lasso's solutions come to where no chunk is looked at."""
        alone = replace(self, options=replace(self.options, read=0, estimate="subsets", redundancy=None))
        return [Attribution(solution, alone._shrunk(solution)) for solution in solutions]

    def _shrunk(self, solution: Solution) -> Solution:
        from stride_cli.recovery.shrinkage import shrink_solution

        return shrink_solution(solution, self.shrinkage)

    def read(
        self,
        queries: QuerySet,
        batches: Sequence[Batch],
        responses: np.ndarray,
        solutions: Sequence[Solution],
    ) -> list[Attribution]:
        """The solutions with what their likeliest chunks' own gradients say, all in one pass over these, and
        with what projections say of the others."""
        from stride_cli.attribution.direct_readout import chunk_influences, direct_scale
        from stride_cli.attribution.estimated import Estimates, projected_part, with_estimates
        from stride_cli.data.batches import RememberingBatch
        from stride_cli.recovery.recall import TOP, counts_others, stated_recall
        from stride_cli.recovery.refinement import with_weights

        for operators in self.operators:
            direct_scale(operators)  # or an error, before anything is read
        if len(queries) <= self.together:  # asked for by the projections, and again by the reading
            batches = [RememberingBatch.of(batch) for batch in batches]
        seconds = self._seconds(queries, batches)
        wanted = self._wanted(solutions, seconds)
        chunks = np.unique(np.concatenate([own.chunks for own in wanted]))
        found = chunk_influences(
            self.steered(),
            batches,
            self.workspace.chunks,
            [own.chunks for own in wanted],
            responses,
            self.designs.row_sizes,
            intercept=self.intercept,
        )
        projected = [
            products
            for products, operators in zip(found.products, self.operators, strict=True)
            if operators.projections is not None
        ]
        answers, explained = [], self.explained(responses)
        for query, (solution, own) in enumerate(zip(solutions, wanted, strict=True)):
            at = np.searchsorted(chunks, own.chunks)
            values = found.influences[query, at]
            shown, above = values, None
            if self.estimates:
                part = projected_part([each.asked for each in seconds.projected], found.unit, query)
                exact = self._exact(own.chunks, values, found.unit.offset[query])
                pairs = None if seconds.pairs is None else seconds.pairs.of(query)
                others = Estimates.of(solution.n_chunks, part, exact, pairs)
                sums = self._responses(explained[query])
                top = TOP if self.reads and counts_others(len(own.chunks)) else 0
                weights, above = with_estimates(solution, exact, others, sums, top)
                shown = others.shared_out(own.chunks, values)
            else:
                weights = with_weights(solution, own.chunks, values, others=own.others)
            recall = None
            if self.reads:
                odds = seconds.odds(query, own, [products[query, at] for products in projected])
                recall = None if odds is None else stated_recall(shown, odds, self.workspace.n_chunks, above)
            if self.options.nonneg:
                weights = replace(weights, values=np.maximum(weights.values, 0.0))
            answers.append(Attribution(solution, self._shrunk(weights), own.chunks, recall, self.estimates))
        return answers

    def _responses(self, explained: np.ndarray) -> Responses:
        """What the subsets of all models answer to one query, (C K,)."""
        from stride_cli.attribution.estimated import Responses

        each = np.split(explained, len(self.operators))
        return Responses(self.designs.each, each, self.method == "linear", self.intercept)

    def _seconds(self, queries: QuerySet, batches: Sequence[Batch]) -> SecondEstimates:
        """What says, beside the recovery, which chunks are worth a look, and what others come to."""
        from stride_cli.attribution.direct_readout import second_estimates

        return second_estimates(self.steered(projected=True), queries, batches, self.workspace)

    def _wanted(self, solutions: Sequence[Solution], seconds: SecondEstimates) -> list[Chosen]:
        """The chunks that are read for each query."""
        from stride_cli.recovery.refinement import Chosen, candidates

        if not self.reads:
            nothing = Chosen(np.empty(0, np.int64), np.empty((1, 0)), 1.0)
            return [nothing] * len(solutions)
        guides = [(seconds.guide(query), seconds.alone(query)) for query in range(len(solutions))]
        return [
            candidates(self.designs.each, solution, self.reads, *both)
            for solution, both in zip(solutions, guides, strict=True)
        ]

    def _exact(self, chunks: np.ndarray, influences: np.ndarray, mean: float) -> Read:
        """What was read for a query, and what is shared out."""
        from stride_cli.attribution.estimated import Read

        order = np.argsort(chunks)
        directions = [own.redundancy for own in self.operators] if self.redundancy else []
        return Read(chunks[order], influences[order], float(mean), directions, self.redundancy)
