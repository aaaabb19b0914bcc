"""`stride evaluate tail-patch`, `removal`, `loo`: train on, or without, what a method points at."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

from index_format.location import local_directory
from stride_cli.commands.options import Asked, Flags, Json, with_flags
from stride_cli.research.commands.evaluate_options import Measured, Results, listed, open_bench, with_error
from stride_cli.research.evaluation.options import BenchOptions, LooOptions, RemovalOptions, TailPatchOptions

if TYPE_CHECKING:
    import numpy as np

    from stride_cli.data.query_set import QuerySet
    from stride_cli.research.evaluation.bench import Bench

TAIL_PATCH_EXAMPLE = """\b
Examples:
  stride evaluate tail-patch --index run.stride
  stride evaluate tail-patch --index run.stride --methods stride,tfidf --top 10,50 --lr 1e-3
"""
REMOVAL_EXAMPLE = """\b
Examples:
  stride evaluate removal --index run.stride --top 50 --limit 5 --seeds 3
  stride evaluate removal --index run.stride --methods stride,chance --queries queries.jsonl --top 1%
  stride evaluate removal --index run.stride --grouped --queries habits.jsonl --top causes --methods bm25
"""
LOO_EXAMPLE = """\b
Examples:
  stride evaluate loo --index run.stride --chunks 40 --seeds 3
  stride evaluate loo --index run.stride --methods stride,graddot --queries queries.jsonl
"""


@with_flags
def tail_patch(
    *,
    where: Asked,
    measured: Measured,
    given: Annotated[dict[str, Any], Flags(TailPatchOptions)],
    json: Json = None,
) -> None:
    """One training step on a query's top chunks: how much more does log p rise than by random chunks?

    A lift above zero is good: the attributed chunks help more (the paper writes the sign the other way).
    """
    from stride_cli.output import progress
    from stride_cli.research.evaluation.bench import split_methods
    from stride_cli.research.evaluation.ranking import check_ks, top_chunks
    from stride_cli.research.evaluation.tail_patch import Patcher, measure_tail_patch

    options, patch = BenchOptions(**measured), TailPatchOptions(**given)
    ks, specs = sorted(listed("--top", patch.top)), split_methods(options.methods)
    precise = where
    if where.model.dtype == "auto":
        precise = replace(where, model=replace(where.model, dtype="fp32"))
    bench = open_bench(precise, options)
    task, chosen = bench.workspace, bench.queries
    check_ks(ks, task.n_chunks)
    patcher = Patcher(task, chosen, lr=patch.lr)
    results = Results(json)
    with progress("tail patch", len(specs), unit="methods") as bar:
        for spec in specs:
            tops = top_chunks(_scores(bench, spec, chosen), max(ks), seed=task.seed)
            for found in measure_tail_patch(patcher, tops, ks, draws=patch.draws):
                record = found.to_record(spec, patch, seed=task.seed)
                parts = (record["lift"], record["attributed"], record["random"])
                cells = [*(with_error(part, 5) for part in parts), f"{record['helped']:.0%}"]
                results.add(record, spec, str(found.k), *cells)
            bar.advance()
    title = f"Δ log p (nats a token) of {len(chosen)} queries after one step, lr {patch.lr:g}"
    results.show(title, ["method", "k", "lift", "attributed", "random", "lift > 0"])


@with_flags
def removal(
    *,
    where: Asked,
    measured: Measured,
    given: Annotated[
        dict[str, Any], Flags(RemovalOptions, first=("top", "limit", "seeds", "draws", "grouped"))
    ],
    json: Json = None,
) -> None:
    """Retrain without a query's k highest chunks: does its prediction suffer more than by random removal?

    Trains seeds × (1 + |k| × (methods × queries + draws)) models; those that are done are kept beside the
    index, and an interrupted run goes on. With --grouped, groups take the place of queries, and causes that
    the queries name are removed too.
    """
    from stride_cli.output import note
    from stride_cli.research.evaluation.bench import split_methods
    from stride_cli.research.evaluation.ranking import check_ks, top_chunks
    from stride_cli.research.evaluation.removal import measure_removal
    from stride_cli.research.training.truth import subset_seeds
    from stride_cli.training.retraining import open_trainer, store_of

    options, removing = BenchOptions(**measured), RemovalOptions(**given)
    if removing.grouped:
        from stride_cli.research.commands.evaluate_groups import removal_of_groups

        removal_of_groups(open_bench(where, options), options, removing, json)
        return
    sizes, specs = listed("--top", removing.top, _part), split_methods(options.methods)
    bench = open_bench(where, options)
    local_directory(bench.where.index)  # refused before a model is opened
    task, chosen = bench.workspace, _draw_queries(bench, removing.limit)
    ks = sorted({k if isinstance(k, int) else max(1, round(k * task.n_chunks)) for k in sizes})
    check_ks(ks, task.n_chunks)
    trainer, store = (
        open_trainer(task, chosen, recipe=removing.recipe, command=removing.command),
        store_of(task.index),
    )
    models = removing.seeds * (1 + len(ks) * (len(specs) * len(chosen) + removing.draws))
    note(f"at most {models:,} models to retrain; kept in {store}")
    seeds = subset_seeds(task.seed, removing.seeds).tolist()
    results = Results(json)
    for spec in specs:
        tops = top_chunks(_scores(bench, spec, chosen), max(ks), seed=task.seed)
        for found in measure_removal(trainer, tops, ks, seeds, removing, store=store, seed=task.seed):
            record = found.to_record(spec, removing, seed=task.seed)
            parts = (
                record["advantage"],
                record["attributed"],
                record["random"],
                record["probability_attributed"],
                record["probability_random"],
            )
            results.add(record, spec, str(found.k), *map(with_error, parts))
    columns = ["method", "k", "advantage", "loss +, top k", "loss +, random", "p −, top k", "p −, random"]
    results.show(f"{len(chosen)} queries after removal, {removing.seeds} seeds", columns)


@with_flags
def loo(
    *,
    where: Asked,
    measured: Measured,
    given: Annotated[dict[str, Any], Flags(LooOptions, first=("chunks", "seeds"))],
    json: Json = None,
) -> None:
    """Leave-one-out agreement: scores of single chunks against retraining without them.

    Correlation over the sampled chunks, mean over queries. One chunk moves a loss less than another seed
    does: look at the noise ceiling before believing a small number.
    """
    from stride_cli.output import note
    from stride_cli.research.evaluation.bench import split_methods
    from stride_cli.research.evaluation.leave_one_out import columns_of, measure_leave_one_out, sample_chunks
    from stride_cli.research.training.truth import subset_seeds
    from stride_cli.training.retraining import open_trainer, store_of

    options, leaving = BenchOptions(**measured), LooOptions(**given)
    specs = split_methods(options.methods)
    bench = open_bench(where, options)
    local_directory(bench.where.index)  # refused before a model is opened
    task, chosen = bench.workspace, bench.queries
    sample = sample_chunks(task.n_chunks, leaving.chunks, seed=task.seed)
    store = store_of(task.index)
    note(f"at most {leaving.seeds * (len(sample) + 1):,} models to retrain; kept in {store}")
    scores = {spec: columns_of(_scores(bench, spec, chosen), sample) for spec in specs}
    found = measure_leave_one_out(
        open_trainer(task, chosen, recipe=leaving.recipe, command=leaving.command),
        sample,
        subset_seeds(task.seed, leaving.seeds).tolist(),
        leaving,
        store=store,
    )
    results = Results(json)
    for spec in specs:
        record = found.to_record(spec, scores[spec], seed=task.seed)
        parts = (record["spearman"], record["pearson"], record["kendall"])
        results.add(record, spec, *map(with_error, parts))
    ceiling = found.ceiling(seed=task.seed)
    title = f"{len(sample)} chunks left out one by one, {leaving.seeds} seeds, {len(chosen)} queries"
    title += f", noise ceiling {ceiling:.3f}" if ceiling is not None else ""
    results.show(title, ["method", "Spearman", "Pearson", "Kendall"])


def _part(text: str) -> int | float:
    """Parse a number of chunks, or a share of all: 10, 1%."""
    return float(text[:-1]) / 100 if text.endswith("%") else int(text)


def _scores(bench: Bench, spec: str, queries: QuerySet) -> Iterator[np.ndarray]:
    """Fit a method and yield blocks of its scores."""
    from stride_cli.research.evaluation.scoring import fitted_method, score_blocks

    workspace = bench.workspace
    return score_blocks(fitted_method(workspace, spec), queries, workspace.n_chunks)


def _draw_queries(bench: Bench, limit: int) -> QuerySet:
    """Draw at most `limit` of the queries by lot, in their order."""
    import numpy as np

    from stride_cli.output import note
    from stride_cli.randomness import stream

    queries = bench.queries
    if len(queries) <= limit:
        return queries
    note(f"{limit} of {len(queries)} queries, drawn by lot (--limit)")
    rows = stream(bench.workspace.seed, "removal queries").permutation(len(queries))[:limit]
    return queries.take(np.sort(rows))
