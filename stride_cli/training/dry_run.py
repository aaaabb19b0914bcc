"""Estimate what fitting an index's operators takes, by timing its first chunks through the real model."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from stride_cli.corpus.gate_budget import basis_bytes, gate_bytes, projected_bytes
from stride_cli.data.batches import ChunkReader
from stride_cli.errors import UsageError
from stride_cli.operators.options import ClosedOptions, TrainOptions, like_own, resolve_settings

if TYPE_CHECKING:
    from index_format.reader import Index
    from stride_cli.models.protocol import AttributableModel
    from stride_cli.schema.train_records import TrainEstimateRecord

_TOKENS = 4096  # of the corpus, that are timed
SUBSETS = 16


class FirstChunks(ChunkReader):
    """The first `count` chunks of an index; what a fit has kept of tokens is of all."""

    def __init__(self, index: Index, count: int) -> None:
        super().__init__(index)
        self.before, self.offsets, self.n_chunks = super().before, self.offsets[: count + 1], count


def estimate_fit(
    index: Index,
    model: AttributableModel,
    options: TrainOptions | None = None,
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> TrainEstimateRecord:
    """Time a fit of the first chunks and extrapolate to the whole corpus; nothing is written.

    Loading, the choice of the step, and null prompts (`estimate_train`) are not in it.

    Raises
    ------
    UsageError      the published recipe is asked for: it takes as many steps as it is told
    """
    from stride_cli.operators.bases import SAMPLE_TOKENS
    from stride_cli.operators.closed import fit_spaces
    from stride_cli.operators.device_memory import resident_bytes
    from stride_cli.operators.gradient_sums import accumulate
    from stride_cli.operators.initial_residuals import load_initial_residuals
    from stride_cli.operators.projections import Projector

    options = options or ClosedOptions()
    if not isinstance(options, ClosedOptions):
        raise UsageError("--dry-run times the closed form", fix="leave out --fit sgd, or give fewer --steps")
    settings = resolve_settings(like_own(options, model, index), model, index)
    # 1. The first chunks that hold enough tokens, and half of them
    offsets = np.asarray(index.array("corpus/chunk_offsets"))
    counts = np.searchsorted(offsets, [_TOKENS // 2, _TOKENS], side="right") - 1
    few = [FirstChunks(index, max(1, int(count))) for count in counts]
    tokens = [int(each.offsets[-1]) for each in few]
    # 2. Of either: the model before training, which is in memory before bases are; these; the pass over the
    # corpus. All subsets are drawn from a few, whose sums take no time to allocate
    before, bases, passes = [], [], []
    for each in few:
        begun = clock()
        load_initial_residuals(model, each, settings, base=options.base)
        before.append(clock() - begun)
    for each, passed in zip(few, before, strict=True):
        begun = clock()
        steered = fit_spaces(model, each, settings)
        bases.append(clock() - begun)
        columns = np.asarray(index.array("design/columns")[: each.n_chunks]) % SUBSETS
        size = settings.project
        projector = Projector(steered.gate_size, size, each.n_chunks, settings.seed) if size else None
        begun = clock()
        accumulate(steered, each, each.plan(settings.batch_tokens), columns, SUBSETS, projector)
        passes.append(passed + clock() - begun)
    # 3. Either takes some time to start, and then time in proportion to its tokens
    sampled = min(index.n_tokens, SAMPLE_TOKENS)
    bases_of_all, corpus = _extended(bases, tokens, sampled), _extended(passes, tokens, index.n_tokens)
    models = 1 + len(options.checkpoints or ())
    return {
        "schema": "stride.train_estimate/1",
        "index": str(index.path),
        "chunks": index.n_chunks,
        "tokens": index.n_tokens,
        "subsets": index.n_subsets,
        "gate_size": steered.gate_size,
        "seconds": {"bases": models * bases_of_all, "corpus": models * corpus, "calibration": 0.0},
        "bytes": models * stored_bytes(index, model, steered.gate_size, size),
        "memory": resident_bytes("VmHWM") if model.device.type == "cpu" else None,
        "timed_tokens": tokens[1],
    }


def _extended(seconds: list[float], tokens: list[int], wanted: int) -> float:
    """Extend the line through two measurements to as many tokens as are wanted."""
    slope = max(0.0, seconds[1] - seconds[0]) / max(1, tokens[1] - tokens[0])
    return seconds[1] + slope * max(0, wanted - tokens[1])


def stored_bytes(index: Index, model: AttributableModel, gate_size: int, projected: int) -> int:
    """Bytes on disk of one model's operators and projections."""
    n, k = index.n_chunks, index.n_subsets
    bases = basis_bytes(k, model.n_layers, model.d_model, finetuned=not model.pretrained)
    return gate_bytes(k, gate_size) + bases + projected_bytes(n, projected) + n
