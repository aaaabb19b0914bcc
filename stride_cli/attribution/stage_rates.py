"""How fast each kind of work of a fit and of a query is on this machine: done once, on little.

What is measured is the product's own code on a few chunks, with a model of the right shape. A deep model need
not be there whole: a block more takes as long as the block before it, so two shallow models of its shape say
how long it takes (`Rates.at_depth`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from stride_cli.data.batches import Batch, ChunkReader
    from stride_cli.models.protocol import AttributableModel
    from stride_cli.operators.closed import ClosedSettings
    from stride_cli.operators.steered_model import SteeredModel

Clock = Callable[[], float]

_OPERATIONS = (
    1.5e10  # of the batch that a pass is measured on, at most; a processor core does as many a second
)
_A_PASS = 6  # for each token and parameter, forward and backward
PROBES, _PROBE_TOKENS = 2, 128  # sequences that a fit's step is chosen on, and their lengths
STEPS_TRIED = 2.5  # on both of them: most are too long by the first
_ASKED = (8, 24)  # as null prompts are
_SUBSETS = 24
_SUM_BYTES = 64 << 20  # of the sums that are added to: more than a processor's cache
_GATE_ROWS = (8, 40)  # of gates that are multiplied with: what grows with them, and what does not


@dataclass(frozen=True)
class Rates:
    """Seconds of every kind of work.

    Attributes
    ----------
    observe : a token of the sample that bases are made of
    bases : making them of what was observed
    scale : a token of the sample that bases are scaled by
    gradients : a chunk's gate gradients
    sums : adding them to the sums of its subsets
    project : projecting them
    before : a token read by the model before training
    step : finding how far the gates may go
    pack : storing a subset's gates
    asked : a query's own pass
    gates, narrow : a query's product with a subset's gates; once a query
    products : of a query's gradient with a chunk's
    estimates : of a query, of a chunk by its projection
    token : one that the model writes
    """

    observe: float
    bases: float
    scale: float
    gradients: float
    sums: float
    project: float
    before: float
    step: float
    pack: float
    asked: float
    gates: float
    narrow: float
    products: float
    estimates: float
    token: float

    def at_depth(self, deeper: Rates, steps: float) -> Rates:
        """Of a model so many steps deeper, where `deeper` is one step deeper than this."""
        found = {
            field.name: max(
                own := getattr(self, field.name), own + steps * (getattr(deeper, field.name) - own)
            )
            for field in fields(self)
        }
        return Rates(**found)

    def lengthened(self, factor: float) -> Rates:
        """Of chunks that are so many times as long."""
        return replace(self, gradients=self.gradients * factor)


def rows_to_measure(chunks: ChunkReader, parameters: int) -> np.ndarray:
    """Chunks that are like all, as many as are held together or fit into a second or so; one at least."""
    from stride_cli.data.batches import TOGETHER

    most = int(_OPERATIONS / (_A_PASS * max(1, parameters) * chunks.mean_length))
    count = max(1, min(TOGETHER, most, chunks.n_chunks))
    order = np.argsort(chunks.lengths, kind="stable")
    middles = (np.arange(count) + 0.5) * len(order) / count  # of every part of the lengths its middle
    return np.sort(order[middles.astype(np.int64)])


def affordable_tokens(parameters: int) -> int:
    """How long a chunk may be, for one of them to be measured in a second or so."""
    return max(16, int(_OPERATIONS / (_A_PASS * max(1, parameters))))


def measure_rates(
    model: AttributableModel,
    chunks: ChunkReader,
    settings: ClosedSettings,
    n_subsets: int,
    *,
    parameters: int | None = None,
    clock: Clock = time.perf_counter,
) -> Rates:
    """Rates of this model, on this machine as it is now.

    What is done for the first time only (a kernel is compiled, a device wakes up) is not measured.

    Parameters
    ----------
    chunks : some of the corpus's, or like them
    settings : of the fit
    n_subsets : K
    parameters : of the model, where not all of its own take part in a pass
    """
    from stride_cli.operators.bases import (
        bases_from,
        curvature_of_sample,
        observe_sample,
        scale_bases,
        scales_bases,
    )
    from stride_cli.operators.beginnings import measure_beginnings
    from stride_cli.operators.closed import basis_options, weighed
    from stride_cli.operators.gradients import gate_gradients

    def timed(work: Callable[[], Any]) -> tuple[Any, float]:
        begun = clock()
        return work(), clock() - begun

    names, options = settings.spaces, basis_options(settings)
    rows = rows_to_measure(chunks, parameters or model.n_parameters)
    tokens = int(chunks.lengths[rows].sum())
    # 1. bases: observed, made, scaled
    observe_sample(model, chunks, names, options, [rows[:1]])
    observed, observing = timed(lambda: observe_sample(model, chunks, names, options, [rows]))
    steered, making = timed(lambda: bases_from(model, chunks, names, options, observed))
    gate_gradients(steered, chunks.batch(rows[:1]))  # its loops are compiled for the first time
    scaling = 0.0
    if scales_bases(names, options):
        squares, scaling = timed(lambda: curvature_of_sample(steered, chunks, options, [rows]))
        scale_bases(steered, *squares)
    steered = weighed(steered, settings)
    # 2. the model before training, where there is one: a forward pass
    batch = chunks.batch(rows)
    few = _only(chunks, batch)
    before = timed(lambda: measure_beginnings(model, few, batch_tokens=settings.batch_tokens))[1]
    # 3. the pass over all chunks
    passing = _pass_rates(steered, batch, settings, n_subsets, timed)
    # 4. the step, null prompts and queries
    asking = _query_rates(steered, few, n_subsets, settings.project, timed)
    return Rates(
        observe=observing / tokens,
        bases=making,
        scale=scaling / tokens,
        before=before / tokens,
        **passing,
        **asking,
    )


def _pass_rates(
    steered: SteeredModel, batch: Batch, settings: ClosedSettings, n_subsets: int, timed: Any
) -> dict[str, float]:
    """What is done for every chunk."""
    from stride_cli.operators.gradients import chunk_gradients
    from stride_cli.operators.projections import Projector
    from stride_cli.operators.subset_sums import SubsetSums

    count, size = len(batch.rows), steered.gate_size
    (gradients, _, _), taken = timed(lambda: chunk_gradients(steered, batch))
    random = np.random.default_rng(0)
    degree = min(10, n_subsets)
    held = min(n_subsets, max(degree, _SUM_BYTES // (4 * size)))
    sums = SubsetSums(held, [space.gate_size for space in steered.spaces])
    columns = np.stack([random.choice(held, degree, replace=False) for _ in range(count)])
    share = batch.scored[:, None].float()
    sums.add(columns, gradients, share)  # its memory is touched for the first time
    _, added = timed(lambda: sums.add(columns, gradients, share))
    projecting = 0.0
    if settings.project:
        projector = Projector(size, settings.project, int(batch.rows.max()) + 1, 0)
        projector.add(batch, gradients)
        _, projecting = timed(lambda: projector.add(batch, gradients))
    return {"gradients": taken / count, "sums": added / count, "project": projecting / count}


def _query_rates(
    steered: SteeredModel, chunks: ChunkReader, n_subsets: int, project: int, timed: Any
) -> dict[str, float]:
    """What is done for every query."""
    from stride_cli.operators.exact_response import measure_exact
    from stride_cli.operators.gates import PackedGates, gate_responses
    from stride_cli.operators.gradients import gate_gradients
    from stride_cli.operators.store import Operators

    random = np.random.default_rng(0)
    least, most = _GATE_ROWS
    gates = [
        (1e-3 * random.standard_normal((most, space.gate_size))).astype(np.float32)
        for space in steered.spaces
    ]
    seen = np.ones(chunks.n_chunks, np.uint8)
    operators = Operators(list(steered.spaces), list(gates), steered.layer, "closed", seen, step=1e-3)
    probe = shaped(chunks, 1, _PROBE_TOKENS)
    length = probe.ids.shape[1]
    # each twice, there and back, forward only
    tried = max(1, min(_SUBSETS, int(_OPERATIONS / (4 * steered.model.n_parameters * length))))
    fitted = replace(steered, fitted=operators)
    _, stepped = timed(lambda: measure_exact(fitted, probe, subsets=np.arange(tried), batch_size=tried))
    asked = shaped(chunks, *_ASKED)
    gate_gradients(steered, asked)
    (gradients, _, _), asking = timed(lambda: gate_gradients(steered, asked))
    vectors = [gradient.cpu().numpy() for gradient in gradients]
    packed, packing = timed(lambda: [PackedGates.of(each) for each in gates])

    def responses(rows: int) -> None:
        for each, vector in zip(packed, vectors, strict=True):
            gate_responses(PackedGates(each.values[:rows], each.scale[:rows]), vector)

    responses(1)
    few, many = timed(lambda: responses(least))[1], timed(lambda: responses(most))[1]
    a_row = max(0.0, many - few) / (most - least) / len(vectors[0])
    _, multiplied = timed(lambda: [gradient @ gradient.T for gradient in gradients])
    return {
        "step": stepped / tried * min(_SUBSETS, n_subsets) * PROBES * STEPS_TRIED,
        "pack": packing / most,
        "asked": asking / len(vectors[0]),
        "gates": a_row,
        "narrow": max(0.0, few / len(vectors[0]) - least * a_row),
        "products": multiplied / len(vectors[0]) ** 2,
        "estimates": _estimates(steered.gate_size, project, timed) if project else 0.0,
        "token": _written(steered.model, timed),
    }


def _estimates(size: int, project: int, timed: Any) -> float:
    """Of one query, of one chunk by its projection."""
    from stride_cli.operators.projections import bit_planes, scan

    random, count, queries = np.random.default_rng(0), 4096, 4
    codes = random.integers(0, 256, (count, project), dtype=np.uint8)
    step, found = random.random(count, np.float32), np.empty((queries, count), np.float32)
    planes, units, _ = bit_planes(random.standard_normal((queries, 8 * project)).astype(np.float32))
    scan(codes, step, planes, units, found)
    seconds: float = timed(lambda: scan(codes, step, planes, units, found))[1]
    return seconds / count / queries


def _written(model: AttributableModel, timed: Any) -> float:
    """A token that is written after a short prompt."""
    few, more, prompt = 2, 10, [0] * min(8, max(1, model.context_length // 2))
    model.generate(prompt, 1)  # type: ignore[attr-defined]
    first = timed(lambda: model.generate(prompt, few))  # type: ignore[attr-defined]
    then = timed(lambda: model.generate(prompt, more))  # type: ignore[attr-defined]
    tokens = len(then[0]) - len(first[0])
    return max(0.0, then[1] - first[1]) / tokens if tokens > 0 else first[1] / max(1, len(first[0]))


def shaped(chunks: Any, count: int, length: int) -> Batch:
    """A batch of so many sequences of so many tokens, of a corpus's first tokens over and over."""
    from stride_cli.data.batches import pad_batch

    length = min(length, int(chunks.lengths.max()))  # no longer than the model reads
    ids = np.resize(np.asarray(chunks.tokens), (count, length)).astype(np.int64)
    return pad_batch(np.arange(count), list(ids), list(np.ones((count, length), np.float32)))


def _only(chunks: ChunkReader, batch: Batch) -> ChunkReader:
    """A reader of a batch's chunks alone."""
    from types import SimpleNamespace

    from stride_cli.data.batches import ChunkReader

    tokens = [chunks.chunk(int(row))[0] for row in batch.rows]
    arrays = {
        "corpus/tokens": np.concatenate(tokens),
        "corpus/chunk_offsets": np.concatenate([[0], np.cumsum([len(each) for each in tokens])]),
        "corpus/loss_start": np.asarray(chunks.loss_start)[batch.rows],
    }
    index: Any = SimpleNamespace(array=arrays.__getitem__, has=arrays.__contains__)
    return ChunkReader(index)
