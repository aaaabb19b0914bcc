"""What it will take to make an index and its operators, measured on a few of the corpus's chunks before."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stride_cli.corpus.build import SampledCorpus
    from stride_cli.corpus.readers import ReadOptions
    from stride_cli.models.protocol import AttributableModel


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
    from stride_cli.corpus.context import context_length, subsets_bound
    from stride_cli.corpus.options import PlanOptions
    from stride_cli.corpus.plan import choose_block_size, choose_design, plan_index
    from stride_cli.models.language.language_recipe import was_finetuned
    from stride_cli.output import progress

    tokenizer = model.tokenizer
    size = choose_block_size(None, context_length(model_path))
    with progress("looking at the corpus"):
        sample = sample_corpus(sources, tokenizer=tokenizer, block_size=size, reading=reading)
    finetuned = was_finetuned(model_path)
    most = subsets_bound(model_path, finetuned=finetuned)
    subsets, _ = choose_design(sample.counts.chunks, most=most)
    with progress("measuring how long it will take"):
        seconds, measured, gates = _seconds(model, sample, subsets)
    plan = plan_index(
        sample.counts,
        PlanOptions(gate_dimension=gates),
        finetuned=finetuned,
        vocabulary=len(tokenizer),
        most_subsets=most,
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
    """Seconds of a fit and its null prompts, the tokens that they were measured on, and p."""
    from stride_cli.attribution.shallow import space_sizes
    from stride_cli.attribution.stage_plan import (
        calibration_seconds,
        fit_seconds,
        solving_seconds,
        work_of,
    )
    from stride_cli.attribution.stage_rates import measure_rates, rows_to_measure
    from stride_cli.data.batches import ChunkReader
    from stride_cli.operators.beginnings import has_beginning
    from stride_cli.operators.options import ClosedOptions, resolve_settings

    chunks = ChunkReader(cast("Any", sample))
    if chunks.scored_tokens() == 0:
        return 0.0, 0, None  # the fit says what is wrong
    index: Any = SimpleNamespace(
        attributes={}, n_subsets=n_subsets, n_chunks=sample.counts.chunks, seed=0, path=None
    )
    settings = resolve_settings(ClosedOptions(), model, index)
    rates = measure_rates(model, chunks, settings, n_subsets)
    gates = [space.gates for space in space_sizes(model, settings, sample.counts, chunks)[0]]
    work = work_of(model, settings, sample.counts, n_subsets, gates, has_beginning(model, settings))
    seconds = sum(fit_seconds(work, rates).values())
    seconds += calibration_seconds(work, rates, solving_seconds(work))
    measured = int(chunks.lengths[rows_to_measure(chunks, model.n_parameters)].sum())
    return seconds, measured, sum(gates)
