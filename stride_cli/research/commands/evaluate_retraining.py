"""`stride evaluate tail-patch`, `removal`, `loo`: train on, or without, what a method points at."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from index_format.location import local_directory
from stride_cli.commands.options import Device, Dtype, Flags, IndexPath, Json, ModelPath, with_flags
from stride_cli.research.commands.evaluate_options import Measured, open_bench
from stride_cli.research.evaluation.options import BenchOptions, LooOptions, RemovalOptions, TailPatchOptions

if TYPE_CHECKING:
    import numpy as np

    from stride_cli.data.query_set import QuerySet
    from stride_cli.prove.resampling import Interval
    from stride_cli.research.evaluation.bench import Bench
    from stride_cli.research.evaluation.records import (
        EstimateRecord,
        LooRecord,
        RemovalRecord,
        TailPatchRecord,
    )

_LIFTS: tuple[Literal["lift", "attributed", "random"], ...] = ("lift", "attributed", "random")
_RISES: tuple[
    Literal["advantage", "attributed", "random", "probability_attributed", "probability_random"], ...
] = ("advantage", "attributed", "random", "probability_attributed", "probability_random")
_CORRELATIONS: tuple[Literal["spearman", "pearson", "kendall"], ...] = ("spearman", "pearson", "kendall")

TAIL_PATCH_EXAMPLE = """\b
Examples:
  stride evaluate tail-patch --index run.stride
  stride evaluate tail-patch --index run.stride --methods stride,tfidf --top 10,50 --lr 1e-3
"""
REMOVAL_EXAMPLE = """\b
Examples:
  stride evaluate removal --index run.stride --top 50 --limit 5 --seeds 3
  stride evaluate removal --index run.stride --methods stride,chance --queries queries.jsonl
  stride evaluate removal --index run.stride --grouped --queries habits.jsonl --top causes --methods bm25
"""
LOO_EXAMPLE = """\b
Examples:
  stride evaluate loo --index run.stride --chunks 40 --seeds 3
  stride evaluate loo --index run.stride --methods stride,graddot --queries queries.jsonl
"""


@with_flags
def tail_patch(
    index: IndexPath = None,
    model: ModelPath = None,
    *,
    measured: Measured,
    given: Annotated[dict[str, Any], Flags(TailPatchOptions)],
    device: Device = None,
    dtype: Dtype = None,
    json: Json = False,
) -> None:
    """One training step on a query's top chunks: how much more does log p rise than by random chunks?

    A lift above zero is good: the attributed chunks help more (the paper writes the sign the other way).
    """
    from stride_cli.commands.tables import print_table, with_error
    from stride_cli.output import emit, progress, wants_json
    from stride_cli.research.evaluation.bench import split_methods
    from stride_cli.research.evaluation.ranking import check_ks, top_chunks
    from stride_cli.research.evaluation.tail_patch import Patcher, measure_tail_patch

    options, patch = BenchOptions(**measured), TailPatchOptions(**given)
    ks = _numbers(patch.top)
    specs = split_methods(options.methods)
    bench = open_bench(index, model, options, device, dtype or "fp32")
    task, chosen = bench.workspace, bench.queries
    check_ks(ks, task.n_chunks)
    patcher = Patcher(task, chosen, lr=patch.lr)
    rows = []
    with progress("tail patch", len(specs), unit="methods") as bar:
        for spec in specs:
            tops = top_chunks(_scores(bench, spec, chosen), max(ks), seed=task.seed)
            for found in measure_tail_patch(patcher, tops, ks, draws=patch.draws):
                parts = found.intervals(seed=task.seed)
                record: TailPatchRecord = {
                    "schema": "stride.tail_patch/1",
                    "method": spec,
                    "k": found.k,
                    "lift": _record(parts["lift"]),
                    "attributed": _record(parts["attributed"]),
                    "random": _record(parts["random"]),
                    "helped": float((found.lift > 0).mean()),
                    "queries": len(chosen),
                    "draws": patch.draws,
                    "lr": patch.lr,
                }
                if wants_json(json):
                    emit(record)
                cells = [with_error(record[key], 5) for key in _LIFTS]
                rows.append([spec, str(found.k), *cells, f"{record['helped']:.0%}"])
            bar.advance()
    if not wants_json(json):
        print_table(
            f"Δ log p (nats a token) of {len(chosen)} queries after one step, lr {patch.lr:g}",
            ["method", "k", "lift", "attributed", "random", "lift > 0"],
            rows,
        )


@with_flags
def removal(
    index: IndexPath = None,
    model: ModelPath = None,
    *,
    measured: Measured,
    given: Annotated[
        dict[str, Any], Flags(RemovalOptions, first=("top", "limit", "seeds", "draws", "grouped"))
    ],
    device: Device = None,
    dtype: Dtype = None,
    json: Json = False,
) -> None:
    """Retrain without a query's k highest chunks: does its prediction suffer more than by random removal?

    Trains seeds × (1 + |k| × (methods × queries + draws)) models; those that are done are kept beside the
    index, and an interrupted run goes on. With --grouped, groups take the place of queries, and causes that
    the queries name are removed too.
    """
    from stride_cli.commands.tables import print_table, with_error
    from stride_cli.output import emit, note, wants_json
    from stride_cli.research.evaluation.bench import split_methods
    from stride_cli.research.evaluation.ranking import check_ks, top_chunks
    from stride_cli.research.evaluation.removal import measure_removal
    from stride_cli.training.retraining import open_trainer, store_of, subset_seeds

    options, removing = BenchOptions(**measured), RemovalOptions(**given)
    if removing.grouped:
        from stride_cli.research.commands.evaluate_groups import removal_of_groups

        removal_of_groups(open_bench(index, model, options, device, dtype), options, removing, json)
        return
    seeds, draws = removing.seeds, removing.draws
    ks = _numbers(removing.top)
    specs = split_methods(options.methods)
    bench = open_bench(index, model, options, device, dtype)
    local_directory(bench.where.index)  # refused before a model is opened
    task = bench.workspace
    chosen = _draw_queries(bench, removing.limit)
    check_ks(ks, task.n_chunks)
    trainer = open_trainer(task, chosen, recipe=removing.recipe, command=removing.command)
    store = store_of(task.index)
    models = seeds * (1 + len(ks) * (len(specs) * len(chosen) + draws))
    note(f"at most {models:,} models to retrain; kept in {store}")
    rows = []
    for spec in specs:
        tops = top_chunks(_scores(bench, spec, chosen), max(ks), seed=task.seed)
        for found in measure_removal(
            trainer,
            tops,
            ks,
            subset_seeds(task.seed, seeds).tolist(),
            store=store,
            draws=draws,
            seed=task.seed,
            engine=removing,
        ):
            parts = found.intervals(seed=task.seed)
            record: RemovalRecord = {
                "schema": "stride.removal/1",
                "method": spec,
                "k": found.k,
                "attributed": _record(parts["attributed"]),
                "random": _record(parts["random"]),
                "advantage": _record(parts["advantage"]),
                "probability_attributed": _record(parts["probability_attributed"]),
                "probability_random": _record(parts["probability_random"]),
                "queries": len(chosen),
                "seeds": seeds,
                "draws": draws,
            }
            if wants_json(json):
                emit(record)
            rows.append([spec, str(found.k), *(with_error(record[name]) for name in _RISES)])
    if not wants_json(json):
        columns = ["method", "k", "advantage", "loss +, top k", "loss +, random", "p −, top k", "p −, random"]
        print_table(f"{len(chosen)} queries after removal, {seeds} seeds", columns, rows)


@with_flags
def loo(
    index: IndexPath = None,
    model: ModelPath = None,
    *,
    measured: Measured,
    given: Annotated[dict[str, Any], Flags(LooOptions, first=("chunks", "seeds"))],
    device: Device = None,
    dtype: Dtype = None,
    json: Json = False,
) -> None:
    """Leave-one-out agreement: scores of single chunks against retraining without them.

    Correlation over the sampled chunks, mean over queries. One chunk moves a loss less than another seed
    does: look at the noise ceiling before believing a small number.
    """
    from stride_cli.commands.tables import print_table, with_error
    from stride_cli.output import emit, note, wants_json
    from stride_cli.research.evaluation.bench import split_methods
    from stride_cli.research.evaluation.leave_one_out import columns_of, measure_leave_one_out, sample_chunks
    from stride_cli.training.retraining import open_trainer, store_of, subset_seeds

    options, leaving = BenchOptions(**measured), LooOptions(**given)
    seeds = leaving.seeds
    specs = split_methods(options.methods)
    bench = open_bench(index, model, options, device, dtype)
    local_directory(bench.where.index)  # refused before a model is opened
    task, chosen = bench.workspace, bench.queries
    sample = sample_chunks(task.n_chunks, leaving.chunks, seed=task.seed)
    store = store_of(task.index)
    note(f"at most {seeds * (len(sample) + 1):,} models to retrain; kept in {store}")
    scores = {spec: columns_of(_scores(bench, spec, chosen), sample) for spec in specs}
    found = measure_leave_one_out(
        open_trainer(task, chosen, recipe=leaving.recipe, command=leaving.command),
        sample,
        subset_seeds(task.seed, seeds).tolist(),
        store=store,
        engine=leaving,
    )
    ceiling = found.ceiling(seed=task.seed)
    rows = []
    for spec in specs:
        correlations, estimates = found.agreement(scores[spec], seed=task.seed)
        record: LooRecord = {
            "schema": "stride.loo/1",
            "method": spec,
            "spearman": _record(estimates["spearman"].joint),
            "pearson": _record(estimates["pearson"].joint),
            "kendall": _record(estimates["kendall"].joint),
            "chunks": len(sample),
            "seeds": seeds,
            "queries": len(chosen),
            "constant_queries": int(correlations.constant.sum()),
            "ceiling": ceiling.value if ceiling else None,
        }
        if wants_json(json):
            emit(record)
        rows.append([spec, *(with_error(record[kind]) for kind in _CORRELATIONS)])
    if not wants_json(json):
        title = f"{len(sample)} chunks left out one by one, {seeds} seeds, {len(chosen)} queries"
        if ceiling:
            title += f", noise ceiling {ceiling.value:.3f}"
        print_table(title, ["method", "Spearman", "Pearson", "Kendall"], rows)


def _scores(bench: Bench, spec: str, queries: QuerySet) -> Any:
    """Blocks of a method's scores."""
    from stride_cli.research.evaluation.scoring import score_blocks
    from stride_cli.research.methods.registry import open_method

    method = open_method(spec)
    method.fit(bench.workspace)
    return score_blocks(method, queries, bench.workspace.n_chunks)


def _draw_queries(bench: Bench, limit: int) -> QuerySet:
    """At most `limit` of the queries, by lot, in their order."""
    import numpy as np

    from stride_cli.output import note
    from stride_cli.randomness import stream

    queries = bench.queries
    if len(queries) <= limit:
        return queries
    note(f"{limit} of {len(queries)} queries, drawn by lot (--limit)")
    rows: np.ndarray = stream(bench.workspace.seed, "removal queries").permutation(len(queries))[:limit]
    return queries.take(np.sort(rows))


def _numbers(text: str) -> list[int]:
    """Whole numbers separated by commas, ascending."""
    from stride_cli.errors import UsageError

    try:
        found = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise UsageError(
            f"--top is '{text}' (expected whole numbers separated by commas)", fix="try --top 10,50"
        ) from None
    return found


def _record(found: Interval) -> EstimateRecord:
    return {"mean": found.mean, "se": found.se, "low": found.low, "high": found.high}
