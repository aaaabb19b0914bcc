"""Several models of one index (checkpoints, other seeds): runs of the pipeline whose influences are averaged.

Models differ in what they learnt of a chunk. One Lasso over all of their measurements would take these
differences for noise, and bend the weights to them. The mean of the models' own runs averages both the
differences and the errors.

Losses of early and late checkpoints differ in scale, and each has one voice: responses of model c are
multiplied by s_0 / s_c, with s_c the standard deviation of its y over the subsets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import TYPE_CHECKING, Any

import numpy as np

from stride_cli.attribution.pipeline import Measurement, Pipeline, Settings, queries_together
from stride_cli.recovery.problem import Solution

if TYPE_CHECKING:
    from stride_cli.attribution.options import RecoveryOptions
    from stride_cli.data.batches import Batch
    from stride_cli.data.query_set import QuerySet
    from stride_cli.data.workspace import Workspace
    from stride_cli.operators.designs import Designs
    from stride_cli.operators.steered_model import SteeredModel
    from stride_cli.operators.store import Operators


def open_pipeline(
    operators: Sequence[Operators],
    load: Callable[[int], SteeredModel],
    designs: Designs,
    workspace: Workspace,
    defaults: dict[str, Any],
    options: RecoveryOptions,
) -> Pipeline | Several:
    """Open the pipeline of one model, or of several.

    Parameters
    ----------
    operators : of C models, the index's own first
    load : the number of a model → it with its operators; called once a pass, so that one may be loaded after
        the other
    designs : of all models
    defaults : of `stride_cli.attribution.defaults.recovery_defaults`
    """
    settings = Settings.resolve(options, defaults, workspace, operators)
    gate_size = sum(own.gate_size for own in operators)
    together = queries_together(workspace.n_chunks, gate_size, workspace.model.device)
    sizes = np.atleast_2d(designs.row_sizes)

    def pipeline(number: int, settings: Settings) -> Pipeline:
        columns = designs.each[number]
        return Pipeline(lambda: load(number), columns, sizes[number], workspace, settings, together)

    if len(operators) == 1:
        return pipeline(0, settings)
    return Several(pipeline, len(operators), workspace, settings, together)


@dataclass(frozen=True)
class Several:
    """The pipelines of C models, asked one after the other.

    Attributes
    ----------
    open : callable      number of a model, settings → its pipeline
    count : C
    workspace, settings, together : as of `Pipeline`
    """

    open: Callable[[int, Settings], Pipeline]
    count: int
    workspace: Workspace
    settings: Settings
    together: int

    def _each(self) -> Iterator[Pipeline]:
        for number in range(self.count):
            yield self.open(number, self.settings)

    def measure(
        self, batches: Sequence[Batch], *, gather: Callable[[np.ndarray], np.ndarray] = lambda rows: rows
    ) -> Measurement:
        """See `Pipeline.measure`: responses and y are those of the models one after the other, (Q, C K), in
        nats of the first, whose losses are told; `scale` is (C, Q). A model whose y does not vary says
        nothing (0); where the first one's does not, the others have no scale to be put on."""
        # 1. Each model in turn, in its own nats
        found = [each.measure(batches, gather=gather) for each in self._each()]
        # 2. s_0 / s_c of every query: at the spread of the first, each model has one voice
        spreads = [own.y.std(axis=-1, dtype=np.float64) for own in found]
        scales = [
            np.divide(spreads[0], spread, out=np.zeros_like(spread), where=spread > 0) for spread in spreads
        ]
        scales[0] = np.ones_like(scales[0])  # also where it does not vary itself
        scaled = [scale[:, None] * own.responses for scale, own in zip(scales, found, strict=True)]
        responses = np.concatenate(scaled, axis=-1)
        return replace(
            found[0],
            columns=None,
            responses=responses,
            y=self.explained(responses)[0],
            scale=np.stack(scales),
        )

    def explained(self, responses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """y of responses (Q, C K), and what that of the first model leaves out; others' is in its nats."""
        parts = np.split(responses, self.count, axis=-1)
        found = [own.explained(part) for own, part in zip(self._each(), parts, strict=True)]
        return np.concatenate([y for y, _ in found], axis=-1), found[0][1]

    def influences(
        self,
        queries: QuerySet | None,
        batches: Sequence[Batch],
        measurement: Measurement,
        *,
        reached: Callable[[str], None] = lambda stage: None,
    ) -> list[Solution]:
        """See `Pipeline.influences`: means over the models, made smaller once they are averaged."""
        from stride_cli.recovery.shrinkage import shrink_solution

        # estimates, candidates, exact gradients and the problem are each model's own
        runs = [
            own.influences(queries, batches, part, shrink=False, reached=reached)
            for own, part in self.parts(measurement)
        ]
        how = self.settings.shrinkage
        return [shrink_solution(mean_solution(each), how) for each in zip(*runs, strict=True)]

    def parts(self, measurement: Measurement) -> Iterator[tuple[Pipeline, Measurement]]:
        """Each model's pipeline with its part of a measurement."""
        split = [np.split(values, self.count, axis=-1) for values in (measurement.responses, measurement.y)]
        for own, scale, responses, y in zip(self._each(), measurement.scale, *split, strict=True):
            part = replace(measurement, columns=own.columns, responses=responses, y=y, scale=scale)
            yield own, replace(part, average=own.explained(responses)[1])


def in_passes(pipeline: Pipeline | Several, queries: QuerySet) -> Iterator[tuple[np.ndarray, list[Solution]]]:
    """Measure queries and find their influences, as many together as fit: yields their rows and solutions."""
    from stride_cli.data.batches import RememberingBatch
    from stride_cli.data.query_set import QUERY_TOKENS

    for start in range(0, len(queries), pipeline.together):
        rows = np.arange(start, min(start + pipeline.together, len(queries)))
        groups = queries.groups(pipeline.workspace.model, QUERY_TOKENS, rows)
        batches = [RememberingBatch.of(queries.batch(group)) for group in groups]
        yield rows, pipeline.influences(queries.take(rows), batches, pipeline.measure(batches))


def mean_solution(solutions: Sequence[Solution]) -> Solution:
    """Average several models' weights.

    λ, λ_max, intercept and R² are means; gaps are the largest; passes and epochs are sums. Residuals stand
    one after the other, each of its own model's weights. Exact are chunks that were read in every model. No
    recall is stated for the mean. The solution of a single model comes back as it is.
    """
    if len(solutions) == 1:
        return solutions[0]
    # a chunk that a model does not list has its average there
    indices = np.unique(np.concatenate([each.indices for each in solutions]))
    total = np.zeros(len(indices))
    for each in solutions:
        own = np.full(len(indices), each.average)
        own[np.searchsorted(indices, each.indices)] = each.values
        total += own / len(solutions)

    names = ("intercept", "lambda_", "lambda_max", "lambda_ratio", "r_squared", "average")
    means: dict[str, Any] = {
        name: float(np.mean([getattr(each, name) for each in solutions])) for name in names
    }
    return replace(
        solutions[0],
        indices=indices,
        values=total,
        duality_gap=max(each.duality_gap for each in solutions),
        relative_gap=max(each.relative_gap for each in solutions),
        n_passes=sum(each.n_passes for each in solutions),
        n_epochs=sum(each.n_epochs for each in solutions),
        residual=np.concatenate([each.residual for each in solutions]),
        moved=max(each.moved for each in solutions),
        exact=reduce(np.intersect1d, [each.exact for each in solutions]),
        recall=None,
        **means,
    )
