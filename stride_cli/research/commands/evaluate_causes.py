"""`stride evaluate causes`: judge methods by documents that are known to have taught an answer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stride_cli.attribution.options import SharingOptions
from stride_cli.commands.options import Flags, Held, IndexPath, Json, find_index, settled, with_flags
from stride_cli.errors import UsageError
from stride_cli.research.commands.evaluate_options import Html, Results, SharedMethods, listed
from stride_cli.research.evaluation.options import CausesOptions

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from index_format.reader import Index
    from stride_cli.data.query_set import QuerySet
    from stride_cli.data.workspace import Workspace, WorkspacePath
    from stride_cli.research.evaluation.cause_queries import CauseQuery
    from stride_cli.research.evaluation.cause_scores import CauseEntry, KeptRanks
    from stride_cli.research.evaluation.records import CausesRecord, KnownRecord

EXAMPLE = """\b
Examples:
  stride evaluate causes --index run.stride --queries queries.jsonl
  stride evaluate causes --train train.jsonl --model finetuned --queries queries.jsonl --base pretrained
  stride evaluate causes --index run.stride --queries queries.jsonl --methods stride,bm25 --html page.html
  stride evaluate causes --date-lm Counterfact --model finetuned --scores EKFAC.json
"""
_AT = (1, 5, 10, 50)


@with_flags
def causes(
    queries: Annotated[
        Path | None,
        typer.Option(
            "--queries", help='JSON Lines of {"id", "prompt", "response", "causes": [ids of documents]}.'
        ),
    ] = None,
    index: IndexPath = None,
    *,
    where: Held,
    train: Annotated[
        str | None,
        typer.Option(
            "--train",
            metavar="CORPUS",
            help="What --model was trained on: where there is no index yet, it is built of this first, with "
            "operators, as stride ask does.",
        ),
    ] = None,
    date_lm: Annotated[
        Path | None,
        typer.Option(
            "--date-lm",
            metavar="DIR",
            help="A set of DATE-LM instead of --train and --queries: its splits train and ref.",
        ),
    ] = None,
    scores: Annotated[
        list[Path] | None,
        typer.Option(
            "--scores",
            metavar="FILE",
            help="Also judge these scores of another tool: JSON, a list over queries of lists over "
            "documents. May be given more than once.",
        ),
    ] = None,
    write_scores: Annotated[
        Path | None,
        typer.Option(
            "--write-scores", metavar="DIR", help="Write every method's scores so: DIR/METHOD.json."
        ),
    ] = None,
    given: Annotated[dict[str, Any], Flags(CausesOptions)],
    shared: SharedMethods,
    html: Html = None,
    json: Json = None,
) -> None:
    """Which method finds the documents that are known to have taught an answer? Recall@k, MRR, AUPRC.

    A document's score is the sum over its chunks; tied documents count as in random order. Intervals are 95 %
    bootstraps over queries. Interrupted, the same command goes on where it was (INDEX.causes).
    """
    from stride_cli.models.kinds import refuse_classifier
    from stride_cli.output import note
    from stride_cli.report.drawing import check_place
    from stride_cli.research.commands.evaluate_options import outlast_reader
    from stride_cli.research.evaluation.bench import split_methods
    from stride_cli.research.evaluation.cause_scores import (
        CauseBench,
        KeptRanks,
        causes_records,
        default_methods,
        ranks_records,
    )
    from stride_cli.research.evaluation.query_groups import GroupRule, build_asked
    from stride_cli.research.evaluation.score_files import read_scores
    from stride_cli.research.evaluation.workers import CauseScorer, shared_causes

    options, sharing = CausesOptions(**given), SharingOptions(**shared)
    # 1. refuse what cannot work before a model is opened
    chosen = None if options.methods is None else split_methods(options.methods)
    rules = [GroupRule.of(spec) for spec in chosen or ()]
    wanted = None if options.at is None else _wanted(options.at)
    if html is not None:
        check_place(html)
    if html is not None or write_scores is not None:
        outlast_reader()
    # 2. the index, the queries with their causes, and other tools' scores
    source = _source(queries, train, date_lm, index)
    where = _prepared(source, index, where)
    workspace = where.open()
    refuse_classifier(workspace.index, "causes are documents")
    asked = source.read(workspace.index)
    n_asked, n_rows = len(asked), source.n_rows or len(asked)
    foreign = [(path, read_scores(path, n_rows, workspace.index.n_documents)) for path in scores or ()]
    ks = _within(wanted, workspace.index.n_documents)
    specs = chosen or default_methods(workspace.index)
    sets = build_asked(workspace, asked, rules, chat=options.chat)
    # 3. the queries that count
    kept, results = KeptRanks(workspace, fresh=options.fresh), Results(json)
    if options.known or options.base is not None:
        asked, sets = _known(workspace, asked, sets, kept, options, results)
    # 4. every method's ranks
    with_scores = write_scores is not None
    bench = CauseBench(workspace, asked, sets, kept, ks, with_scores=with_scores)
    read = [bench.take(path, found) for path, found in foreign]
    del foreign
    runs: Iterable[CauseEntry] = map(bench.run, specs)
    if sharing.shared:
        runs = shared_causes(CauseScorer(where, asked, sets, ks, with_scores, options.fresh), specs, sharing)
    entries: list[CauseEntry] = []
    for number, entry in enumerate(chain(read, runs)):
        results.count(entry.method, entry.error, entry.fix)
        if entry.error is None and write_scores is not None and number >= len(read):
            bench.write(entry, write_scores, n_rows, one_list=source.one_list)
        entries.append(entry.without_scores())
        for ranks in ranks_records(bench, entry) if results.json else ():
            results.add(ranks)
    # 5. measures, each against the best other method
    records = causes_records(bench, entries, asked=n_asked, draws=options.draws)
    for record in records if results.json else ():
        results.add(record)
    if not results.json:
        _show(records)
    if html is not None:
        from stride_cli.research.pages.causes_page import write_page

        write_page(html, bench, entries, records)
        note(f"wrote {html}")
    results.close()


@dataclass(frozen=True)
class _Source:
    """Documents and queries; `n_rows` lists of a file of scores, None: one a query."""

    queries: Path
    train: str | None
    index: Path | None = None
    n_rows: int | None = None
    one_list: bool = False

    def read(self, index: Index) -> list[CauseQuery]:
        """Read the queries, with their causes found in the index."""
        from stride_cli.research.evaluation.cause_queries import read_cause_queries

        asked = read_cause_queries(self.queries, index)
        # DATE-LM's are called by their rows, and those without causes are not among them
        return asked if self.n_rows is None else [replace(query, row=int(query.id)) for query in asked]


def _source(queries: Path | None, train: str | None, date_lm: Path | None, index: str | None) -> _Source:
    """Find what was named; write a set of DATE-LM beside its index first, as corpus and queries."""
    from stride_cli.commands.ask import beside
    from stride_cli.output import note

    if date_lm is None:
        if queries is None:
            raise UsageError(
                "no queries are given",
                fix="give --queries FILE with their causes, or a set with --date-lm DIR",
            )
        return _Source(queries, train)
    from stride_cli.research.evaluation.date_lm import convert

    if queries is not None or train is not None:
        raise UsageError(
            "--date-lm is corpus and queries, and so are --train and --queries", fix="give one or the other"
        )
    place = Path(index) if index is not None else beside(str(date_lm), ".stride")
    found = convert(date_lm, place.with_name(place.name + ".date-lm"))
    told = f"DATE-LM ({found.task}): {found.n_train:,} rows of train, {found.n_ref:,} of ref"
    if found.n_queries < found.n_ref:
        told += f", of which {found.n_ref - found.n_queries:,} have no cause and are left out"
    note(told)
    return _Source(found.queries, str(found.train), place, found.n_ref, found.one_list)


def _prepared(source: _Source, index: str | None, where: WorkspacePath) -> WorkspacePath:
    """Find the index and its model; build and fit it first where it is missing and its corpus is named."""
    from stride_cli import api
    from stride_cli.attribution.options import CalibrationOptions
    from stride_cli.commands.ask import beside
    from stride_cli.commands.train import train_settings
    from stride_cli.output import note

    if source.train is None:
        return replace(where, index=find_index(index))
    place = source.index or (Path(index) if index is not None else beside(source.train, ".stride"))
    where, nulls = replace(where, index=place), settled(CalibrationOptions, {})
    api.prepare([source.train], where, training=train_settings(), calibration=nulls, say=note)
    return where


def _known(
    workspace: Workspace,
    asked: list[CauseQuery],
    sets: Mapping[str, QuerySet],
    kept: KeptRanks,
    options: CausesOptions,
    results: Results,
) -> tuple[list[CauseQuery], dict[str, QuerySet]]:
    """Keep the queries that count: answered rightly by the model, and not by the base model.

    Raises
    ------
    UsageError      there is none
    """
    from stride_cli.data.queries import form_of
    from stride_cli.output import note
    from stride_cli.research.evaluation.known_answers import answers

    form = form_of(workspace, options.chat)
    own = list(answers(workspace.model, asked, form, kept))
    base = None
    if options.base is not None:
        from stride_cli.models.loading import load_model

        like = workspace.model
        before = load_model(replace(like.spec.at(options.base), device=str(like.device), dtype="auto"))
        base = list(answers(before, asked, form, kept, called="the base model"))
        del before
    rows = []
    for row, (query, answer) in enumerate(zip(asked, own, strict=True)):
        other = None if base is None else base[row]
        counts = answer.right and not (other is not None and other.right)
        record: KnownRecord = {
            "schema": "stride.known/1",
            "query": query.id,
            "answer": answer.text,
            "right": answer.right,
            "base_answer": None if other is None else other.text,
            "base_right": None if other is None else other.right,
            "counts": counts,
        }
        results.add(record)
        rows += [row] if counts else []
    told = f"the model answers {sum(answer.right for answer in own):,} of {len(asked):,} queries rightly"
    if base is not None:
        told += f", the base model {sum(answer.right for answer in base):,}"
    note(f"{told}: {len(rows):,} count")
    if not rows:
        raise UsageError(
            f"{told}: none counts", fix="leave out --known and --base, or give queries that it has learnt"
        )
    return [asked[row] for row in rows], {name: each.take(rows) for name, each in sets.items()}


def _wanted(text: str) -> list[int]:
    """Parse the k of Recall@k, ascending."""
    found = sorted(listed("--at", text, example="1,5,10"))
    if found[0] < 1:
        raise UsageError(
            f"--at is '{text}' (expected whole numbers from 1, separated by commas)", fix="try --at 1,5,10"
        )
    return found


def _within(ks: Sequence[int] | None, n_documents: int) -> list[int]:
    """Check that no k of Recall@k is above the number of documents; by default take those that are not."""
    if ks is None:
        return [k for k in _AT if k < n_documents] or [1]
    if ks[-1] > n_documents:
        raise UsageError(
            f"--at has {ks[-1]:,}, and the index has {n_documents:,} documents", fix="give smaller numbers"
        )
    return list(ks)


def _show(records: Sequence[CausesRecord]) -> None:
    """Print two tables: every measure of every method, and its lead over the best other method."""
    from stride_cli.commands.tables import print_table
    from stride_cli.research.commands.evaluate_options import seconds

    names = [*(f"Recall@{each['k']}" for each in records[0]["recall"]), "MRR", "AUPRC"]
    first = records[0]
    of = f"{first['counted']:,} queries with known causes among {first['documents']:,} documents"
    if first["counted"] < first["queries"]:
        of += f" ({first['queries']:,} asked)"
    measured = [[*record["recall"], record["mrr"], record["auprc"]] for record in records]
    pooled = any("pooled" in record for record in records)
    rows, ahead = [], []
    for record, found in zip(records, measured, strict=True):
        added = [f"{record['pooled']['average_precision']:.3f}" if "pooled" in record else "–"]
        cells = [*map(_plain, found), *(added if pooled else [])]
        rows.append([record["method"], *cells, seconds(record["seconds"]["query"])])
        ahead.append([record["method"], *(_plain(each["difference"], sign="+") for each in found)])
    heads = [*names, *(["AUPRC, added up"] if pooled else []), "a query"]
    print_table(f"{of}; 95 % intervals", ["method", *heads], rows)
    if len(records) > 1:
        print_table("minus the best other method, query by query", ["method", *names], ahead)


def _plain(found: Mapping[str, Any], sign: str = "") -> str:
    """Format ``0.412 [0.37, 0.45]``; – where the method failed, or there is no other."""
    if found["mean"] is None:
        return "–"
    return f"{found['mean']:{sign}.3f} [{found['low']:{sign}.2f}, {found['high']:{sign}.2f}]"
