"""`stride evaluate`: how good is an attribution? Scores against models that were really retrained."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stride_cli.attribution.options import SharingOptions
from stride_cli.commands.options import Asked, Flags, Json, with_flags
from stride_cli.commands.panels import CommandLine
from stride_cli.research.commands.evaluate_causes import EXAMPLE as CAUSES_EXAMPLE
from stride_cli.research.commands.evaluate_causes import causes
from stride_cli.research.commands.evaluate_options import (
    Compared,
    Html,
    Measured,
    Results,
    SharedMethods,
    open_bench,
    with_error,
)
from stride_cli.research.commands.evaluate_retraining import (
    LOO_EXAMPLE,
    REMOVAL_EXAMPLE,
    TAIL_PATCH_EXAMPLE,
    loo,
    removal,
    tail_patch,
)
from stride_cli.research.commands.evaluate_selection import EXAMPLE as SELECTION_EXAMPLE
from stride_cli.research.commands.evaluate_selection import selection
from stride_cli.research.commands.evaluate_truth import EXAMPLE as TRUTH_EXAMPLE
from stride_cli.research.commands.evaluate_truth import truth
from stride_cli.research.evaluation.options import BenchOptions, LdsOptions

if TYPE_CHECKING:
    from stride_cli.research.evaluation.compare import Entry, Ground

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
    *, where: Asked, measured: Measured, compared: Compared, shared: SharedMethods, json: Json = None
) -> None:
    """Linear datamodeling score: do summed scores predict the losses of models retrained on subsets?

    Correlation over the subsets, mean over queries, with a bootstrap interval over both.
    """
    from stride_cli.research.commands.evaluate_options import seconds
    from stride_cli.research.evaluation.bench import split_methods
    from stride_cli.research.evaluation.compare import lds_record
    from stride_cli.research.evaluation.workers import Runs

    options, judged, sharing = BenchOptions(**measured), LdsOptions(**compared), SharingOptions(**shared)
    specs = split_methods(options.methods)
    bench = open_bench(where, options, alpha=judged.alpha)
    run = Runs(bench, specs, sharing) if sharing.shared else None
    results = Results(json)
    for entry, ground in bench.lds(specs, response=judged.response, draws=judged.draws, run=run):
        results.count(entry.method, entry.error, entry.fix)
        record = lds_record(entry, ground)
        parts = (record["spearman"], record["pearson"], record["kendall"])
        results.add(record, entry.method, *map(with_error, parts), seconds(entry.seconds))
    results.show(_title(ground), ["method", "LDS (Spearman)", "Pearson", "Kendall", "time"])
    results.close()


@with_flags
def distribution(*, where: Asked, measured: Measured, json: Json = None) -> None:
    """Measure how influence is spread over the chunks: zeros, Gini, coverage of the top 10 %, active sets."""
    from stride_cli.commands.tables import number
    from stride_cli.research.evaluation.bench import split_methods
    from stride_cli.research.evaluation.compare import describe_methods, distribution_record
    from stride_cli.research.evaluation.scoring import run_method

    options = BenchOptions(**measured)
    specs = split_methods(options.methods)
    bench = open_bench(where, options)
    workspace, chosen, n_chunks = bench.workspace, bench.queries, bench.index.n_chunks
    results = Results(json)
    run = partial(run_method, workspace, queries=chosen, describe=True)
    for entry in describe_methods(specs, run):
        results.count(entry.method, entry.error, entry.fix)
        record = distribution_record(entry, n_chunks, len(chosen))
        shares = (record["sparsity"], record["gini"], record["top10_coverage"])
        active = (record["active_mean"], record["active_p50"], record["active_p90"])
        cells = [*(number(each, ".4f") for each in shares), *(number(each, ",.0f") for each in active)]
        results.add(record, entry.method, *cells)
    results.show(
        f"influence over {n_chunks:,} chunks, mean of {len(chosen):,} queries",
        ["method", "zeros", "Gini", "top-10 % coverage", "active mean", "p50", "p90"],
    )
    results.close()


@with_flags
def compare(
    *,
    where: Asked,
    measured: Annotated[dict[str, Any], Flags(BenchOptions, methods={"default": "stride,tfidf,chance"})],
    compared: Compared,
    shared: SharedMethods,
    given: Annotated[
        str | None,
        typer.Option(
            "--given", help="One of the methods (tfidf …): also correlate what is left without its part."
        ),
    ] = None,
    html: Html = None,
    json: Json = None,
) -> None:
    """Methods side by side on the same truth: LDS, difference to the first, time, memory, disk.

    Every method runs in a process of its own, one after the other (--workers: several at a time), so that its
    memory is its own. One that fails is reported in its record, and the others go on.
    """
    from stride_cli.commands.tables import number, size
    from stride_cli.errors import UsageError
    from stride_cli.output import note, progress
    from stride_cli.research.commands.evaluate_options import outlast_reader, seconds
    from stride_cli.research.evaluation.bench import split_methods
    from stride_cli.research.evaluation.compare import compare_methods, comparison_record
    from stride_cli.research.evaluation.workers import Runs
    from stride_cli.research.pages.comparison_page import write_page

    options, judged = BenchOptions(**measured), LdsOptions(**compared)
    specs = split_methods(options.methods)
    if given is not None and given not in specs:
        raise UsageError(f"--given {given} is not among the methods", fix="name it in --methods too")
    if html is not None:
        if not html.resolve().parent.is_dir():
            raise UsageError(
                f"there is no directory '{html.parent}'", fix="make it, or give another --html path"
            )
        outlast_reader()
    bench = open_bench(where, options, alpha=judged.alpha)
    ground = bench.ground(judged.response)
    names = [bench.truth.queries.names[row] for row in bench.rows]
    # the method whose part is taken out of the others comes second, and the reference's record waits for it
    order = specs[:1] + sorted(specs[1:], key=lambda spec: spec != given)
    run = Runs(bench, order, SharingOptions(**shared))
    results = Results(json)
    entries: list[Entry] = []
    waiting: list[Entry] = []
    taken_out: Entry | None = None
    with progress("comparing", len(specs), unit="methods") as bar:
        for entry in compare_methods(order, ground, run, draws=judged.draws, seed=bench.index.seed):
            bar.advance()
            results.count(entry.method, entry.error, entry.fix)
            entries.append(entry)
            waiting.append(entry)
            taken_out = entry if entry.method == given else taken_out
            if given is not None and taken_out is None:
                continue
            for ready in waiting:
                record = comparison_record(ready, ground, specs[0], names=names, given=taken_out)
                results.add(
                    record,
                    ready.method,
                    with_error(record["spearman"]),
                    with_error(record["difference"]),
                    *([] if given is None else [number(record["partial"]["mean"], "+.3f")]),
                    seconds(record["seconds"]["fit"]),
                    seconds(record["seconds"]["query"]),
                    size(record["peak_memory"]),
                    size(record["bytes_per_chunk"]),
                )
            waiting.clear()
    net = [] if given is None else [f"net of {given}"]
    columns = ["method", "LDS (Spearman)", f"minus {specs[0]}", *net, "fit", "query", "memory", "disk/chunk"]
    results.show(_title(ground), columns)
    if html is not None:
        write_page(html, entries, ground, index_name=bench.where.index.name)
        note(f"wrote {html}")
    results.close()


def _title(ground: Ground) -> str:
    ceiling = "" if ground.ceiling is None else f", noise ceiling {ground.ceiling:.3f}"
    return (
        f"{ground.n_subsets} subsets of α = {ground.alpha:g} × {ground.seeds}, "
        f"{ground.n_queries} queries, by {ground.response}{ceiling}"
    )


def _add(name: str, command: Callable[..., None], example: str, about: str) -> None:
    app.command(name, epilog=example, short_help=about)(command)


_add("truth", truth, TRUTH_EXAMPLE, "Retrain on random subsets: what lds compares with.")
_add("lds", lds, LDS_EXAMPLE, "Do summed scores predict the losses of retrained models?")
_add("tail-patch", tail_patch, TAIL_PATCH_EXAMPLE, "One training step on the top chunks: does it help?")
_add("removal", removal, REMOVAL_EXAMPLE, "Retrain without the top chunks: how much is lost?")
_add("loo", loo, LOO_EXAMPLE, "Scores of single chunks against retraining without them.")
_add("distribution", distribution, DISTRIBUTION_EXAMPLE, "How influence is spread over the chunks.")
_add("compare", compare, COMPARE_EXAMPLE, "Methods side by side on the same truth.")
_add("causes", causes, CAUSES_EXAMPLE, "Which method finds documents that are known to be causes?")
_add("selection", selection, SELECTION_EXAMPLE, "Fine-tune on chosen, random and BM25 documents.")
