"""What it will take to make an index and its operators, measured on a few of the corpus's chunks before."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stride_cli.corpus.build import SampledCorpus
    from stride_cli.corpus.readers import ReadOptions
    from stride_cli.data.batches import ChunkReader
    from stride_cli.models.protocol import AttributableModel

_FEW, _MORE = 128, 1024  # tokens that bases are fitted on: what grows with them, and what does not
_PROBES = (2, 128)  # sequences, tokens: of what a fit's step is chosen on
_ASKED = (8, 32)  # as null prompts are
_SUBSETS = 24
_NULL_RESPONSES = 300  # a hundred prompts, each cut to three lengths


@dataclass(frozen=True)
class Needs:
    """What an index and its operators will take.

    Attributes
    ----------
    documents, chunks, tokens : of the corpus
    subsets : K
    block_size : most tokens of a chunk
    bytes : on disk, all together
    whole : whether the corpus was counted; else its size is estimated from its first megabyte
    seconds : building, fitting and asking null prompts, on this machine as it is now
    measured_tokens : of the chunks that the seconds were measured on
    """

    documents: int
    chunks: int
    tokens: int
    subsets: int
    block_size: int
    bytes: int
    whole: bool
    seconds: float
    measured_tokens: int


def measure_needs(
    model: AttributableModel, model_path: str, sources: Sequence[str], reading: ReadOptions
) -> Needs:
    """What `build_index` and `train` with their defaults will take; nothing is written.

    Raises
    ------
    CorpusError      the corpus cannot be read, or has no chunk
    """
    from stride_cli.corpus.build import sample_corpus
    from stride_cli.corpus.context import context_length
    from stride_cli.corpus.options import PlanOptions
    from stride_cli.corpus.plan import choose_block_size, choose_design, plan_index
    from stride_cli.models.language.language_recipe import was_finetuned
    from stride_cli.output import progress

    tokenizer = model.tokenizer
    size = choose_block_size(None, context_length(model_path))
    with progress("looking at the corpus"):
        sample = sample_corpus(sources, tokenizer=tokenizer, block_size=size, reading=reading)
    subsets, _ = choose_design(sample.counts.chunks)
    with progress("measuring how long it will take"):
        seconds, measured, gates = _seconds(model, sample, subsets)
    plan = plan_index(
        sample.counts,
        PlanOptions(gate_dimension=gates),
        finetuned=was_finetuned(model_path),
        vocabulary=len(tokenizer),
    )
    return Needs(
        documents=sample.counts.documents,
        chunks=plan.n_chunks,
        tokens=sample.counts.tokens,
        subsets=plan.n_subsets,
        block_size=size,
        bytes=plan.total_bytes + plan.gate_bytes + plan.projection_bytes + plan.pass_bytes,
        whole=sample.whole,
        seconds=sample.seconds + seconds,
        measured_tokens=measured,
    )


def _seconds(
    model: AttributableModel, sample: SampledCorpus, n_subsets: int
) -> tuple[float, int, int | None]:
    """Seconds of a fit and its null prompts, the tokens that they were measured on, and p.

    Every kind of work is done once, on little, and counted as often as it will be done; what is done once
    for the first time (a kernel is compiled, a device wakes up) is not measured.
    """
    from stride_cli.data.batches import ChunkReader
    from stride_cli.operators.bases import sample_size
    from stride_cli.operators.closed import fit_spaces
    from stride_cli.operators.exact_response import MOST_STEPS, measure_exact
    from stride_cli.operators.gates import gate_responses
    from stride_cli.operators.gradients import chunk_gradients
    from stride_cli.operators.linear_response import measure_linear
    from stride_cli.operators.options import ClosedOptions, resolve_settings
    from stride_cli.operators.projections import Projector
    from stride_cli.operators.store import Operators
    from stride_cli.randomness import stream

    def reader(tokens: int) -> ChunkReader:
        return ChunkReader(cast("Any", sample.first(tokens)))

    few, more = reader(_FEW), reader(_MORE)
    if more.scored_tokens() == 0:
        return 0.0, 0, None  # the fit says what is wrong
    index: Any = SimpleNamespace(
        attributes={}, n_subsets=n_subsets, n_chunks=sample.counts.chunks, seed=0, path=None
    )
    settings = resolve_settings(ClosedOptions(), model, index)
    tokens, here = sample.counts.tokens, int(more.lengths.sum())
    # 1. bases: a part that is fixed, and two passes over a sample of the corpus
    fit_spaces(model, few, settings)
    _, little = _timed(lambda: fit_spaces(model, few, settings))
    steered, much = _timed(lambda: fit_spaces(model, more, settings))
    rate = max(0.0, much - little) / max(1, here - int(few.lengths.sum()))
    seconds = little + rate * min(tokens, sample_size(model.d_model))
    # 2. one forward pass of the model before its fine-tuning, where there is one
    seconds += before_seconds(model, more, settings) * tokens / here
    # 3. the pass over all chunks, with what is kept of each
    projector = Projector(steered.gate_size, settings.project or 1, more.n_chunks, 0)

    def all_chunks() -> None:
        for batch in more.batches(settings.batch_tokens):
            projector.add(batch, chunk_gradients(steered, batch)[0])

    a_pass = _timed(all_chunks)[1] / here
    seconds += a_pass * tokens
    # 4. the step: steered continuations of a few sequences
    random = stream(0, "needs")
    gates = [
        (1e-3 * random.standard_normal((min(_SUBSETS, n_subsets), space.gate_size))).astype(np.float32)
        for space in steered.spaces
    ]
    seen = np.ones(more.n_chunks, np.uint8)
    operators = Operators(list(steered.spaces), list(gates), steered.layer, "closed", seen, step=1e-3)
    steered = replace(steered, fitted=operators)
    probes = _shaped(more, *_PROBES)
    _, spent = _timed(lambda: measure_exact(steered, probes, subsets=np.arange(1)))
    seconds += spent * len(gates[0]) * MOST_STEPS
    # 5. null prompts: measured, and their chunks read
    asked = _shaped(more, *_ASKED)
    _, spent = _timed(lambda: measure_linear(steered, asked))
    vector = [np.zeros((_ASKED[0], gate.shape[1]), np.float32) for gate in gates]
    _, answered = _timed(lambda: [gate_responses(*pair) for pair in zip(gates, vector, strict=True)])
    spent += answered * (n_subsets / len(gates[0]) - 1)
    seconds += spent * math.ceil(_NULL_RESPONSES / _ASKED[0])
    return seconds, here, steered.gate_size


def before_seconds(model: AttributableModel, chunks: ChunkReader, settings: Any) -> float:
    """What `know_beginnings` takes for these chunks; 0 where it makes no pass."""
    from stride_cli.operators.beginnings import measure_beginnings, recorded_base
    from stride_cli.operators.opener import Opener

    averaged = getattr(settings, "residuals", "final") == "average"
    base = recorded_base(model, tell=lambda text: None) if averaged else None  # the fit tells
    if base is None:
        return 0.0
    before = Opener.like(model).load(base)
    measure_beginnings(before, chunks, batch_tokens=settings.batch_tokens)
    return _timed(lambda: measure_beginnings(before, chunks, batch_tokens=settings.batch_tokens))[1]


def _shaped(chunks: Any, count: int, length: int) -> Any:
    """A batch of so many sequences of so many tokens, of a corpus's first tokens over and over."""
    from stride_cli.data.batches import pad_batch

    length = min(length, int(chunks.lengths.max()))  # no longer than the model reads
    ids = np.resize(np.asarray(chunks.tokens), (count, length)).astype(np.int64)
    return pad_batch(np.arange(count), list(ids), list(np.ones((count, length), np.float32)))


def _timed(work: Callable[[], Any]) -> tuple[Any, float]:
    begun = time.perf_counter()
    return work(), time.perf_counter() - begun
