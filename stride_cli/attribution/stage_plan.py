"""What every stage of an index will take, before there is one: memory, disk and time, from shapes alone.

No weights are loaded. Sizes follow from the model's configuration and the corpus's counts by the rules that
build, fit and query themselves go by; time from rates that are measured on shallow models of that shape
(`stage_rates`), times how often each kind of work will be done. All of it is an estimate, and so called.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from stride_cli.attribution.stage_rates import PROBES, STEPS_TRIED, Clock, Rates
from stride_cli.errors import UsageError

if TYPE_CHECKING:
    from stride_cli.attribution.shallow import Shape, SpaceSize
    from stride_cli.corpus.options import PlanOptions
    from stride_cli.corpus.plan import CorpusCounts, Plan
    from stride_cli.corpus.readers import ReadOptions
    from stride_cli.data.batches import ChunkReader
    from stride_cli.operators.closed import ClosedSettings

_NULL_PROMPTS, _NULL_RESPONSES, _NULL_TOKENS = 100, 300, 16  # each cut to three lengths
_NULL_GROUPS = 3  # of one length, which are continued together
_APART = 0.35  # the share of null responses whose chunks are not those of others
_QUERY_TOKENS = 16
_ASKED_TOKENS = 24  # of a null prompt with its response
_HALVES = 20
_SHOWN = 10  # documents whose passages are looked for
_WRITTEN = 4e8  # bytes a second that an index is written, and read when it is opened
_HASHED = 4e8  # bytes a second of a model's weights
_TOKENISED = 4e5  # tokens a second, of a corpus that is not there to measure it
_TOUCHED = 2.5e9  # bytes a second of memory that is used for the first time
_IMPORTS = 300 << 20  # of a program with torch, where the system does not say
_SMALL_IMPORTS = 60 << 20  # without
_START, _SMALL_START = 2.5, 0.4  # seconds of such programs' start, at least
_HEAD_COPIES = 5  # of a block of logits (`models.head`)
_GRADIENT_COPIES = 5  # of chunks' gate gradients, on their way to the sums
_READ_HEAD_COPIES, _READ_GRADIENT_COPIES = 3, 4  # where nothing is drawn, or added to sums
_NUMBERS_A_CHUNK = 24  # bytes: lengths, and the order of a pass; projections are in mapped files
_QUERY_COPIES = 2  # of queries' gate gradients
_BUILT = 16 << 20  # what a build holds of any corpus
_BUILT_A_TOKEN = 40  # bytes of what is tokenised and not yet written, up to a batch


@dataclass(frozen=True)
class Stage:
    """One stage.

    Attributes
    ----------
    stage : "build", "before", "fit", "projections", "calibrate", "query" or "reading"
    command : that it is part of
    seconds : float
    memory_bytes : int      at most, of the process, while it lasts
    device_bytes : int      at most, of a GPU; 0 without one
    disk_bytes : int        that it adds to the index
    """

    stage: str
    command: str
    seconds: float
    memory_bytes: int
    device_bytes: int
    disk_bytes: int


@dataclass(frozen=True)
class StagePlan:
    """An index before it is made, and what making and asking it will take.

    Attributes
    ----------
    plan : Plan
    stages : in the order in which they come
    rates : that the seconds are made of, on the device as it was
    rates_seconds : that measuring these took
    reads : chunks that a query reads
    tokens_a_second : that pass through a fit, by these rates
    device : "cpu" or "cuda"
    streamed : whether weights of blocks stay on disk, and come while their block runs
    advice : what to change where something does not fit
    """

    plan: Plan
    stages: list[Stage]
    rates: Rates
    rates_seconds: float
    reads: int
    tokens_a_second: float
    device: str
    streamed: bool
    advice: list[str]

    def to_record(self) -> dict[str, Any]:
        """Of `stride index plan`, without its schema."""
        found = asdict(self)
        return found.pop("plan") | found


@dataclass(frozen=True)
class Room:
    """Bytes that are free; None where that is not known, or there is no such device."""

    memory: int | None = None
    disk: int | None = None
    device: int | None = None


@dataclass(frozen=True)
class Work:
    """How much there is to do.

    Attributes
    ----------
    chunks, tokens : n, N
    subsets, degree : K, d
    gates : p of all spaces
    project : bytes a chunk
    sample : tokens that bases are made of, and that they are scaled by
    reads : chunks that a query reads
    together : queries that are asked at once
    fine_tuned : whether a model before training says how sure it was
    packed : whether gates are stored in a byte each
    """

    chunks: int
    tokens: int
    subsets: int
    degree: int
    gates: int
    project: int
    sample: tuple[int, int]
    reads: int
    together: int
    fine_tuned: bool
    packed: bool


def work_of(
    model: Any,
    settings: ClosedSettings,
    counts: CorpusCounts,
    n_subsets: int,
    gates: Sequence[int],
    has_base: bool,
) -> Work:
    """What there is to do for a corpus.

    Parameters
    ----------
    model : or what says of itself what it would (`shallow.AsDeep`)
    n_subsets : K
    gates : p of each space
    has_base : whether a model before training says how sure it was
    """
    from types import SimpleNamespace

    from stride_cli.attribution.attributor import queries_together
    from stride_cli.attribution.defaults import default_reads
    from stride_cli.corpus.gate_budget import PACKED_BYTES
    from stride_cli.corpus.options import DesignOptions
    from stride_cli.corpus.plan import choose_design
    from stride_cli.operators.bases import sample_size
    from stride_cli.operators.closed import is_whitened

    place: Any = SimpleNamespace(
        model=model, chunks=SimpleNamespace(mean_length=counts.tokens / counts.chunks)
    )
    readable: Any = [SimpleNamespace(direct_scale=1.0 if is_whitened(settings) else None)]
    return Work(
        chunks=counts.chunks,
        tokens=counts.tokens,
        subsets=n_subsets,
        degree=choose_design(counts.chunks, DesignOptions(n_subsets=n_subsets))[1],
        gates=sum(gates),
        project=settings.project,
        sample=(min(counts.tokens, sample_size(model.d_model)), min(counts.tokens, sample_size(0))),
        reads=min(default_reads(place, readable), counts.chunks),
        together=queries_together(counts.chunks, sum(gates), model.device),
        fine_tuned=has_base,
        packed=any(4 * n_subsets * each > PACKED_BYTES for each in gates),
    )


def fit_seconds(work: Work, rates: Rates) -> dict[str, float]:
    """Seconds of the stages of `stride train`, without starting it."""
    numbers = 4 * work.subsets * work.gates
    fit = rates.bases + rates.observe * work.sample[0] + rates.scale * work.sample[1]
    fit += work.chunks * (rates.gradients + rates.sums) + rates.step
    fit += numbers / _TOUCHED + (work.subsets * rates.pack if work.packed else 0.0)
    return {
        "before": rates.before * work.tokens if work.fine_tuned else 0.0,
        "fit": fit,
        "projections": rates.project * work.chunks,
    }


def calibration_seconds(work: Work, rates: Rates, solve: float) -> float:
    """Seconds of asking null prompts, without starting; `solve` is of one query's recovery."""
    from stride_cli.attribution.direct_readout import scans

    written = max(_NULL_GROUPS * _NULL_TOKENS * rates.token, _NULL_PROMPTS * _NULL_TOKENS * rates.asked / 60)
    each = rates.asked + rates.narrow + work.subsets * rates.gates + solve
    found = written + _NULL_RESPONSES * each
    if not work.reads:
        return found
    left = _NULL_RESPONSES
    while left > 0:
        queries = min(left, work.together)
        chunks = _read_together(work, queries)
        found += chunks * (rates.gradients + queries * rates.products)
        found += queries * scans(work.chunks) * work.chunks * rates.estimates
        left -= queries
    return found


def _read_together(work: Work, queries: int) -> float:
    """Different chunks that so many null prompts read."""
    if queries == 1:
        return float(min(work.reads, work.chunks))
    drawn = 1 + _APART * (queries - 1)
    return work.chunks * -math.expm1(drawn * math.log1p(-min(0.999, work.reads / work.chunks)))


def query_seconds(work: Work, rates: Rates, solve: float) -> dict[str, float]:
    """Seconds of one query in a program that is running, and of them what reading chunks takes."""
    from stride_cli.attribution.direct_readout import scans

    reading = min(work.reads, work.chunks) * (rates.gradients + rates.products)
    reading += scans(work.chunks) * work.chunks * rates.estimates
    shown = min(work.chunks, 2 * _SHOWN) * rates.gradients
    asked = _QUERY_TOKENS * rates.token + rates.asked + rates.narrow + work.subsets * rates.gates
    return {"reading": reading, "query": asked + solve * (1 + _HALVES) + reading + shown}


def fetching_seconds(work: Work, shape: Shape) -> dict[str, float]:
    """Seconds of the stages in which weights of a streamed model come: `shape.fetch` for every pass through
    all blocks, there and, where it is differentiated, back."""
    from stride_cli.data.batches import TOGETHER
    from stride_cli.data.query_set import QUERY_TOKENS

    def batches(tokens: float, chunks: float) -> int:
        return math.ceil(max(tokens / shape.settings.batch_tokens, chunks / TOGETHER))

    mean = work.tokens / max(1, work.chunks)
    corpus = batches(work.tokens, work.chunks)
    drawn = sum(batches(tokens, 0) for tokens in work.sample)  # labels of their own, and of the model
    step = 2 * round(STEPS_TRIED * PROBES)  # there and back, all subsets tried at once
    groups = math.ceil(_NULL_RESPONSES / max(1, QUERY_TOKENS // _ASKED_TOKENS))
    read_by_all = _read_together(work, _NULL_RESPONSES) if work.reads else 0.0
    nulls = _NULL_GROUPS * _NULL_TOKENS + 2 * groups + 2 * batches(read_by_all * mean, read_by_all)
    reading = 2 * batches(work.reads * mean, work.reads)
    shown = 2 * batches(2 * _SHOWN * mean, 0)
    passes = {
        "before": corpus if work.fine_tuned else 0,
        "fit": 3 * drawn + 2 * corpus + step,
        "projections": 0,
        "calibrate": nulls,
        "query": _QUERY_TOKENS + 2 + reading + shown,
        "reading": reading,
    }
    return {stage: shape.fetch * count for stage, count in passes.items()}


def fit_memory(work: Work, shape: Shape, imports: int, batch_tokens: int) -> tuple[int, int]:
    """Bytes that a fit holds at most, in memory and, where there is a GPU, on it."""
    import torch

    from stride_cli.models.head import block_bytes
    from stride_cli.operators.budget import chunks_at_once

    device = torch.device(shape.device)
    head = block_bytes(device)
    mean = work.tokens / max(1, work.chunks)
    observed = min(batch_tokens, work.tokens) * shape.token_bytes
    observed += _HEAD_COPIES * min(head, 4 * shape.vocabulary * min(batch_tokens, work.tokens))
    observed += shape.moment_bytes
    held = min(chunks_at_once(device, work.gates), work.chunks)
    tokens = min(batch_tokens, round(held * mean))
    passing = tokens * shape.token_bytes + _GRADIENT_COPIES * 4 * held * work.gates
    passing += _HEAD_COPIES * min(head, 4 * shape.vocabulary * tokens)
    sums = 4 * work.subsets * work.gates
    numbers = _NUMBERS_A_CHUNK * work.chunks
    stored = numbers + shape.held_bytes
    if shape.device == "cuda":
        return imports + sums + numbers, shape.placed_bytes + max(observed, passing + sums)
    finishing = sums // 4 if work.packed else 0
    return imports + stored + max(observed, sums + max(passing, finishing)), 0


def asking_memory(work: Work, shape: Shape, imports: int, batch_tokens: int, queries: int) -> tuple[int, int]:
    """Bytes that asking so many queries together holds, beside mapped files."""
    import torch

    from stride_cli.data.query_set import QUERY_TOKENS
    from stride_cli.models.head import block_bytes
    from stride_cli.operators.budget import chunks_at_once

    device = torch.device(shape.device)
    mean = work.tokens / max(1, work.chunks)
    held = min(chunks_at_once(device, work.gates), work.reads, work.chunks)
    group = min(queries, QUERY_TOKENS // _ASKED_TOKENS)
    tokens = min(batch_tokens, max(group * _ASKED_TOKENS, round(held * mean)))
    if not work.reads:
        queries = group  # gradients of those before are let go
    logits = min(block_bytes(device), 4 * shape.vocabulary * tokens)
    working = tokens * shape.token_bytes + _READ_HEAD_COPIES * logits
    working += 4 * work.gates * (_QUERY_COPIES * queries + _READ_GRADIENT_COPIES * held)
    small = imports + 8 * work.chunks
    if shape.device == "cuda":
        return small + 4 * work.gates * queries, shape.placed_bytes + working
    return small + shape.held_bytes + working, 0


def stored_bytes(subsets: int, space: SpaceSize) -> int:
    """Of one space on disk: its gates, in a byte each where they are many, and its basis."""
    from stride_cli.corpus.gate_budget import PACKED_BYTES

    gates = 4 * subsets * space.gates
    if gates > PACKED_BYTES:
        gates = subsets * space.gates + 4 * subsets * -(-space.gates // 256)
    return gates + space.basis_bytes


def advised(
    stages: Sequence[Stage],
    work: Work,
    free: Room,
    saved: int = 0,
) -> list[str]:
    """What to change where the largest stage is more than the memory, or all of it more than the disk, that
    there is.

    Parameters
    ----------
    saved : bytes of weights that --stream would leave on disk; 0 where they are there
    """
    found = []
    for what, there in (("memory", free.memory), ("device", free.device)):
        largest = max(stages, key=lambda stage: getattr(stage, f"{what}_bytes"))
        need = getattr(largest, f"{what}_bytes")
        if there is None or need <= there:
            continue
        sums = 4 * work.subsets * work.gates
        where = " on the GPU" if what == "device" else ""
        said = f"{largest.stage} needs {_size(need)}{where}, {_size(there)} are free"
        if saved and need - saved <= there:
            found.append(f"{said}: give --stream, which leaves {_size(saved)} of weights on disk")
        elif largest.stage != "build" and sums > need // 3:
            fewer = max(1, int(work.subsets * there / need * 0.8))
            found.append(
                f"{said}: {_size(sums)} are sums of {work.subsets:,} subsets × {work.gates:,} gates; build "
                f"with --subsets {fewer}, or train with a smaller --buckets or --rank"
            )
        else:
            streamed = f"--stream ({_size(saved)} less), " if saved else ""
            found.append(
                f"{said}: give {streamed}--dtype bf16, a smaller --batch-tokens, or a smaller --block-size"
            )
    disk = sum(stage.disk_bytes for stage in stages)
    if free.disk is not None and disk > free.disk:
        found.append(
            f"the index takes {_size(disk)}, {_size(free.disk)} are free on the disk: --no-text, a smaller "
            "--project or --subsets"
        )
    return found


def _size(count: int) -> str:
    from stride_cli.operators.device_memory import size_in_words

    return size_in_words(count)


def plan_stages(
    model_path: str,
    options: PlanOptions,
    *,
    sources: Sequence[str] = (),
    reading: ReadOptions | None = None,
    clock: Clock = time.perf_counter,
) -> StagePlan:
    """What every stage will take of a corpus, or of `options.chunks` whole blocks, with that model.

    Raises
    ------
    CorpusError      the corpus cannot be read, or has no chunk
    ModelError       the model's configuration or tokenizer cannot be read, or there is no model of its shape
    """
    begun = clock()
    from stride_cli.corpus.build import sample_corpus, survey_corpus
    from stride_cli.corpus.context import context_length
    from stride_cli.corpus.plan import CorpusCounts, choose_block_size, choose_design
    from stride_cli.corpus.readers import ReadOptions
    from stride_cli.models.kinds import kind_of
    from stride_cli.models.language.files import find_offline
    from stride_cli.models.language.language_recipe import most_subsets
    from stride_cli.models.language.tokenizer import load_tokenizer

    if kind_of(model_path) == "classifier":
        raise UsageError(
            "a plan is of a language model's corpus, and the model is a classifier",
            fix="leave --model out, and give --chunks",
        )
    if sources:
        tokenizer = load_tokenizer(model_path)
    else:
        find_offline(model_path)  # refuses, as that does, one that needs code of its own
    loading = clock() - begun
    block = choose_block_size(options.block_size, context_length(model_path))
    tokenising, some, vocabulary = 0.0, None, None
    if sources:
        vocabulary = len(tokenizer)
        given: dict[str, Any] = {"block_size": block, "reading": reading or ReadOptions()}
        begun = clock()
        counts = survey_corpus(sources, tokenizer=tokenizer, **given)
        tokenising = loading + clock() - begun
        choose_design(counts.chunks, options)  # or an error, before anything is measured
        some = sample_corpus(sources, tokenizer=tokenizer, **given)
    else:
        assert options.chunks is not None
        counts = CorpusCounts(documents=0, chunks=options.chunks, tokens=options.chunks * block)
        choose_design(counts.chunks, options)
        tokenising = counts.tokens / _TOKENISED
    small = _anonymous() or _SMALL_IMPORTS
    if options.n_subsets is None:
        subsets = choose_design(counts.chunks, options, most_subsets(model_path))[0]
        options = replace(options, n_subsets=subsets)
    return _planned(model_path, options, counts, some, block, (tokenising, small), vocabulary, clock)


def _planned(
    model_path: str,
    options: PlanOptions,
    counts: CorpusCounts,
    some: Any,
    block: int,
    build: tuple[float, int],
    vocabulary: int | None,
    clock: Clock,
) -> StagePlan:
    import shutil

    begun = clock()
    from stride_cli.attribution.session import Session  # noqa: F401
    from stride_cli.attribution.shallow import shape_of, synthetic_chunks
    from stride_cli.corpus.plan import choose_design, plan_index
    from stride_cli.data.batches import ChunkReader
    from stride_cli.free_memory import available_bytes
    from stride_cli.models.language.language_recipe import was_finetuned
    from stride_cli.models.language.streaming import free_bytes

    start = max(_START, clock() - begun)
    imports = _anonymous() or _IMPORTS
    begun = clock()
    subsets, _ = choose_design(counts.chunks, options)
    reader: ChunkReader = (
        ChunkReader(some)
        if some is not None
        else synthetic_chunks(block, min(counts.chunks, 256), model_path)
    )
    shape = shape_of(model_path, reader, counts, subsets, options.project, clock)
    if options.gate_dimension is None:
        options = replace(options, gate_dimension=shape.gates)
    else:
        shape = shape.with_gates(options.gate_dimension)
    finetuned = was_finetuned(model_path)
    plan = plan_index(counts, options, finetuned=finetuned, vocabulary=vocabulary or shape.vocabulary)
    work = work_of(
        shape.deep, shape.settings, counts, subsets, [space.gates for space in shape.spaces], shape.has_base
    )
    solve = solving_seconds(work, clock)
    measured = clock() - begun
    stages = _stages(plan, work, shape, solve, (start, imports), build)
    # checkpoints are fitted one after the other, and measured with so
    times = 1 + options.checkpoints
    stages = [
        stage
        if stage.stage == "build"
        else replace(stage, seconds=stage.seconds * times, disk_bytes=stage.disk_bytes * times)
        for stage in stages
    ]
    rates = shape.rates
    card = free_bytes(shape.deep.device) if shape.device == "cuda" else None
    free = Room(available_bytes(), shutil.disk_usage(Path.cwd()).free, card)
    left = 0 if shape.mapped or shape.streamed else shape.weight_bytes - shape.streamed_bytes
    advice = advised(stages, work, free, left)
    passing = work.tokens / max(1e-9, work.chunks * (rates.gradients + rates.sums + rates.project))
    return StagePlan(plan, stages, rates, measured, work.reads, passing, shape.device, shape.streamed, advice)


def _stages(
    plan: Plan,
    work: Work,
    shape: Shape,
    solve: float,
    program: tuple[float, int],
    build: tuple[float, int],
) -> list[Stage]:
    """Every stage with one model.

    Parameters
    ----------
    solve : seconds of one query's recovery
    program : seconds to start one with torch, and bytes that it holds
    build : seconds of tokenising the corpus, and bytes of a program that does
    """
    from stride_cli.corpus.gate_budget import projected_bytes

    start, imports = program
    tokenising, small = build
    fit, asked = fit_seconds(work, shape.rates), query_seconds(work, shape.rates, solve)
    stored = work.chunks + 8 + sum(stored_bytes(work.subsets, space) for space in shape.spaces)
    kept = projected_bytes(work.chunks, work.project)
    opening = (plan.total_bytes + stored + kept) / _WRITTEN
    built = _SMALL_START + tokenising + shape.checkpoint_bytes / _HASHED + plan.total_bytes / _WRITTEN
    held = small + min(plan.build_memory_bytes, _BUILT + _BUILT_A_TOKEN * work.tokens)
    batch = shape.settings.batch_tokens
    fitting = fit_memory(work, shape, imports, batch)
    nulls = asking_memory(work, shape, imports, batch, min(work.together, _NULL_RESPONSES))
    one = asking_memory(work, shape, imports, batch, 1)
    calibrated = start + opening + calibration_seconds(work, shape.rates, solve)
    if shape.streamed:  # opened, and then block by block
        start += shape.fetch
        came = fetching_seconds(work, shape)
        fit = {stage: seconds + came[stage] for stage, seconds in fit.items()}
        asked = {stage: seconds + came[stage] for stage, seconds in asked.items()}
        calibrated += shape.fetch + came["calibrate"]
    return [
        Stage("build", "index build", built, held, 0, plan.total_bytes),
        Stage("before", "train", fit["before"], *fitting, work.tokens if work.fine_tuned else 0),
        Stage("fit", "train", start + fit["fit"] + stored / _WRITTEN, *fitting, stored),
        Stage("projections", "train", fit["projections"] + kept / _WRITTEN, *fitting, kept),
        Stage("calibrate", "calibrate", calibrated, *nulls, 0),
        Stage("query", "query", start + asked["query"], *one, 0),  # digests have been compared before
        Stage("reading", "query", asked["reading"], *one, 0),
    ]


def solving_seconds(work: Work, clock: Clock = time.perf_counter) -> float:
    """Seconds of one query's recovery, measured with a design of that size or of a smaller one."""
    from stride_cli.operators.designs import Designs
    from stride_cli.recovery.problem import LassoSettings
    from stride_cli.recovery.several import solve_models

    few = min(work.chunks, 50_000)
    subsets = min(work.subsets, few)
    design = Designs.drawn(few, subsets, min(work.degree, subsets), 0)
    random = np.random.default_rng(0)
    responses = np.zeros((4, subsets))
    for row in responses:  # a few chunks with influence, and noise
        for chunk in random.choice(few, min(10, few), replace=False):
            row[design.columns[chunk]] += 1.0 + random.random()
        row += 0.03 * random.standard_normal(subsets)
    settings = LassoSettings(0.03, True, False)
    solve_models(design.each, responses[:1], settings, n_subsets=subsets)
    begun = clock()
    solve_models(design.each, responses, settings, n_subsets=subsets)
    return (clock() - begun) / len(responses) * work.chunks / few


def _anonymous() -> int | None:
    """Bytes of this process's own pages; None where the system does not say."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon")), None)
