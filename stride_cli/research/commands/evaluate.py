"""`stride evaluate`: how good is an attribution? Scores against models that were really retrained."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stride_cli.attribution.options import SharingOptions
from stride_cli.commands.options import Device, Dtype, Flags, IndexPath, Json, ModelPath, with_flags
from stride_cli.commands.panels import CommandLine
from stride_cli.errors import EXIT_USAGE
from stride_cli.research.commands import (
    evaluate_causes,
    evaluate_retraining,
    evaluate_selection,
    evaluate_truth,
)
from stride_cli.research.commands.evaluate_options import Compared, Measured, SharedMethods, open_bench
from stride_cli.research.evaluation.options import BenchOptions, LdsOptions

if TYPE_CHECKING:
    from stride_cli.research.evaluation.compare import Entry, Ground
    from stride_cli.research.evaluation.scoring import Run

app = CommandLine(help="How good an attribution is, measured on retrained models.")

LDS_EXAMPLE = """\b
Examples:
  stride evaluate lds --index run.stride
  stride evaluate lds --index run.stride --methods stride,tfidf:ngrams=1,chance --alpha 0.5
"""
DISTRIBUTION_EXAMPLE = """\b
Examples:
  stride evaluate distribution --index run.stride
  stride evaluate distribution --index run.stride --methods stride,tfidf --queries queries.jsonl
"""
COMPARE_EXAMPLE = """\b
Examples:
  stride evaluate compare --index run.stride --methods stride,tfidf,graddot,chance
  stride evaluate compare --index run.stride --methods stride,bm25 --html comparison.html
  stride evaluate compare --index run.stride --methods tfidf,stride,ekfac --given tfidf --json | jq .partial
"""


@with_flags
def lds(
    index: IndexPath = None,
    model: ModelPath = None,
    *,
    measured: Measured,
    compared: Compared,
    shared: SharedMethods,
    device: Device = None,
    dtype: Dtype = None,
    json: Json = False,
) -> None:
    """Linear datamodeling score: do summed scores predict the losses of models retrained on subsets?

    Correlation over the subsets, mean over queries, with a bootstrap interval over both.
    """
    from stride_cli.commands.tables import print_table, seconds, with_error
    from stride_cli.output import emit, wants_json
    from stride_cli.research.evaluation.bench import split_methods
    from stride_cli.research.evaluation.compare import lds_record
    from stride_cli.research.evaluation.shared_scores import SharedRuns

    options, judged = BenchOptions(**measured), LdsOptions(**compared)
    specs = split_methods(options.methods)
    bench = open_bench(index, model, options, device, dtype, alpha=judged.alpha)
    rows, failed = [], 0
    sharing = SharingOptions(**shared)
    run = SharedRuns(bench, specs, sharing) if sharing.shared else None
    for entry, ground in bench.lds(specs, response=judged.response, draws=judged.draws, run=run):
        failed += _report_failure(entry)
        record = lds_record(entry, ground)
        if wants_json(json):
            emit(record)
        correlations = [with_error(record[kind]) for kind in ("spearman", "pearson", "kendall")]
        rows.append([entry.method, *correlations, seconds(entry.seconds)])
    if not wants_json(json):
        print_table(_title(ground), ["method", "LDS (Spearman)", "Pearson", "Kendall", "time"], rows)
    if failed == len(specs):
        raise typer.Exit(EXIT_USAGE)


@with_flags
def distribution(
    index: IndexPath = None,
    model: ModelPath = None,
    *,
    measured: Measured,
    device: Device = None,
    dtype: Dtype = None,
    json: Json = False,
) -> None:
    """How influence is spread over the chunks: zeros, Gini, coverage of the top 10 %, active sets."""
    from stride_cli.commands.tables import number, print_table
    from stride_cli.output import emit, wants_json
    from stride_cli.research.evaluation.bench import split_methods
    from stride_cli.research.evaluation.compare import describe_methods, distribution_record
    from stride_cli.research.evaluation.scoring import run_method

    options = BenchOptions(**measured)
    specs = split_methods(options.methods)
    bench = open_bench(index, model, options, device, dtype)
    chosen = bench.queries
    rows, failed = [], 0
    for entry in describe_methods(
        specs, lambda spec: run_method(bench.workspace, spec, chosen, describe=True)
    ):
        failed += _report_failure(entry)
        record: Mapping[str, Any] = distribution_record(entry, bench.index.n_chunks, len(chosen))
        if wants_json(json):
            emit(record)
        shares = [number(record[key], ".4f") for key in ("sparsity", "gini", "top10_coverage")]
        active = [number(record[f"active_{key}"], ",.0f") for key in ("mean", "p50", "p90")]
        rows.append([entry.method, *shares, *active])
    if not wants_json(json):
        print_table(
            f"influence over {bench.index.n_chunks:,} chunks, mean of {len(chosen):,} queries",
            ["method", "zeros", "Gini", "top-10 % coverage", "active mean", "p50", "p90"],
            rows,
        )
    if failed == len(specs):
        raise typer.Exit(EXIT_USAGE)


@with_flags
def compare(
    index: IndexPath = None,
    model: ModelPath = None,
    *,
    measured: Annotated[dict[str, Any], Flags(BenchOptions, methods={"default": "stride,tfidf,chance"})],
    compared: Compared,
    shared: SharedMethods,
    given: Annotated[
        str | None,
        typer.Option(
            "--given",
            help="One of the methods (tfidf …): also correlate what is left without its part.",
        ),
    ] = None,
    html: Annotated[
        Path | None, typer.Option("--html", help="Also write a page with the plots (self-contained).")
    ] = None,
    device: Device = None,
    dtype: Dtype = None,
    json: Json = False,
) -> None:
    """Methods side by side on the same truth: LDS, difference to the first, time, memory, disk.

    Every method runs in a process of its own, one after the other (--workers: several at a time), so that its
    memory is its own. One that fails is reported in its record, and the others go on.
    """
    from stride_cli.commands.tables import number, print_table, seconds, size, with_error
    from stride_cli.errors import UsageError
    from stride_cli.output import emit, note, outlast_reader, progress, wants_json
    from stride_cli.research.evaluation.apart import run_apart
    from stride_cli.research.evaluation.bench import split_methods
    from stride_cli.research.evaluation.compare import compare_methods, comparison_record
    from stride_cli.research.evaluation.shared_scores import SharedRuns
    from stride_cli.research.pages.comparison_page import write_page

    options, judged = BenchOptions(**measured), LdsOptions(**compared)
    sharing = SharingOptions(**shared)
    specs = split_methods(options.methods)
    if given is not None and given not in specs:
        raise UsageError(f"--given {given} is not among the methods", fix="name it in --methods too")
    if html is not None and not html.resolve().parent.is_dir():
        raise UsageError(f"there is no directory '{html.parent}'", fix="make it, or give another --html path")
    if html is not None:
        outlast_reader()
    bench = open_bench(index, model, options, device, dtype, alpha=judged.alpha)
    ground = bench.ground(judged.response)
    rows = bench.rows
    entries: list[Entry] = []
    table = []
    taken_out: Entry | None = None
    # the method whose part is taken out of the others comes second, and the reference's record waits for it
    order = specs[:1] + sorted(specs[1:], key=lambda spec: spec != given)
    names = [bench.truth.queries.names[row] for row in rows]
    waiting: list[Entry] = []
    run: Callable[[str], Run] = partial(
        run_apart, bench.where, alpha=ground.alpha, rows=rows, source=bench.source
    )
    if sharing.shared:
        run = SharedRuns(bench, order, sharing)
    with progress("comparing", len(specs), unit="methods") as bar:
        for entry in compare_methods(
            order,
            ground,
            run,
            draws=judged.draws,
            seed=bench.index.seed,
        ):
            bar.advance()
            _report_failure(entry)
            entries.append(entry)
            waiting.append(entry)
            if entry.method == given:
                taken_out = entry
            if given is not None and taken_out is None:
                continue
            for ready in waiting:
                record = comparison_record(ready, ground, specs[0], names=names, given=taken_out)
                if wants_json(json):
                    emit(record)
                own = ready.run
                table.append(
                    [
                        ready.method,
                        with_error(record["spearman"]),
                        with_error(record["difference"]),
                        *([] if given is None else [number(record["partial"]["mean"], "+.3f")]),
                        seconds(record["seconds"]["fit"]),
                        seconds(record["seconds"]["query"]),
                        size(own.memory_bytes if own else None),
                        size(own.bytes_per_chunk if own else None),
                    ]
                )
            waiting.clear()
    if not wants_json(json):
        columns = [
            "method",
            "LDS (Spearman)",
            f"minus {specs[0]}",
            *([] if given is None else [f"net of {given}"]),
            "fit",
            "query",
            "memory",
            "disk/chunk",
        ]
        print_table(_title(ground), columns, table)
    if html is not None:
        write_page(html, entries, ground, index_name=bench.where.index.name)
        note(f"wrote {html}")
    if all(entry.error is not None for entry in entries):
        raise typer.Exit(EXIT_USAGE)


def _report_failure(entry: Entry) -> int:
    """Says on stderr that a method failed; 1 if it did."""
    from stride_cli.output import note

    if entry.error is None:
        return 0
    note(f"{entry.method} failed: {entry.error}" + (f"\n  fix: {entry.fix}" if entry.fix else ""))
    return 1


def _title(ground: Ground) -> str:
    ceiling = f", noise ceiling {ground.ceiling.value:.3f}" if ground.ceiling else ""
    return (
        f"{ground.n_subsets} subsets of α = {ground.alpha:g} × {ground.seeds}, "
        f"{ground.n_queries} queries, by {ground.response}{ceiling}"
    )


app.command(epilog=evaluate_truth.EXAMPLE, short_help="Retrain on random subsets: what lds compares with.")(
    evaluate_truth.truth
)
app.command(epilog=LDS_EXAMPLE, short_help="Do summed scores predict the losses of retrained models?")(lds)
app.command(
    "tail-patch",
    epilog=evaluate_retraining.TAIL_PATCH_EXAMPLE,
    short_help="One training step on the top chunks: does it help?",
)(evaluate_retraining.tail_patch)
app.command(
    epilog=evaluate_retraining.REMOVAL_EXAMPLE, short_help="Retrain without the top chunks: how much is lost?"
)(evaluate_retraining.removal)
app.command(
    epilog=evaluate_retraining.LOO_EXAMPLE,
    short_help="Scores of single chunks against retraining without them.",
)(evaluate_retraining.loo)
app.command(epilog=DISTRIBUTION_EXAMPLE, short_help="How influence is spread over the chunks.")(distribution)
app.command(epilog=COMPARE_EXAMPLE, short_help="Methods side by side on the same truth.")(compare)
app.command(
    epilog=evaluate_causes.EXAMPLE, short_help="Which method finds documents that are known to be causes?"
)(evaluate_causes.causes)
app.command(epilog=evaluate_selection.EXAMPLE, short_help="Fine-tune on chosen, random and BM25 documents.")(
    evaluate_selection.selection
)
