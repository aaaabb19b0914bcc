"""`stride baseline METHOD`: what another attribution method answers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stride_cli.commands.completion import complete_method
from stride_cli.commands.options import Flags, Held, IndexPath, Json, find_index, with_flags
from stride_cli.errors import UsageError
from stride_cli.research.commands.evaluate_options import Results, open_bench
from stride_cli.research.evaluation.options import BenchOptions, RankingOptions

if TYPE_CHECKING:
    from stride_cli.research.evaluation.records import MethodRecord, RankedDocument, RankingRecord

EXAMPLE = """\b
Examples:
  stride baseline --list
  stride baseline tfidf --index run.stride --queries queries.jsonl --top 10
  stride baseline graddot --index run.stride --queries queries.jsonl --scores scores.npy
  stride baseline ekfac --index run.stride --queries queries.jsonl --scores ekfac
"""


@with_flags
def baseline(
    method: Annotated[
        str | None,
        typer.Argument(
            metavar="METHOD",
            help="A method, with options as in tfidf:ngrams=1,top=100; any takes "
            "top=K (its K strongest scores) and shrink=true.",
            autocompletion=complete_method,
        ),
    ] = None,
    listed: Annotated[bool, typer.Option("--list", help="Say which methods there are, and leave.")] = False,
    index: IndexPath = None,
    *,
    where: Held,
    asked: Annotated[dict[str, Any], Flags(BenchOptions, only=("queries", "chat"))],
    given: Annotated[dict[str, Any], Flags(RankingOptions)],
    scores: Annotated[
        Path | None,
        typer.Option(
            "--scores",
            metavar="FILE.npy|DIR",
            help="Write the scores of all chunks, (Q, n) float32, or of documents, as bergson reads them.",
        ),
    ] = None,
    json: Json = None,
) -> None:
    """Rank documents for every query by any attribution method: the sum of their chunks' scores.

    Above zero the document supports the query. Units differ by method. Documents whose score is exactly zero
    are left out: among ties there is no evidence.
    """
    if listed:
        _list_methods(json)
        return
    import numpy as np

    from stride_cli.commands.tables import print_table
    from stride_cli.output import emit, note, progress, wants_json
    from stride_cli.research.commands.evaluate_options import outlast_reader
    from stride_cli.research.evaluation.ranking import document_scores, rank_documents
    from stride_cli.research.evaluation.scoring import ScoreFile, score_blocks
    from stride_cli.research.methods.registry import open_method

    if method is None:
        raise UsageError("no method is given", fix="see which there are: stride baseline --list")
    shown = RankingOptions(**given)
    opened = open_method(method)
    bench = open_bench(replace(where, index=find_index(index)), BenchOptions(**asked))
    chosen, task = bench.queries, bench.workspace
    owner = np.asarray(task.index.array("corpus/chunk_document"))
    opened.fit(task)
    if scores is not None:
        outlast_reader()
    names = iter(chosen.names)
    row = 0
    with (
        ScoreFile(scores, (len(chosen), task.n_chunks), task.index.n_documents) as file,
        progress("scoring", len(chosen), unit="queries") as bar,
    ):
        for block in score_blocks(opened, chosen, task.n_chunks):
            documents = document_scores(block, owner, task.index.n_documents)
            file.write(row, block, documents)
            row += len(block)
            for values in documents:
                hits: list[RankedDocument] = [
                    {"rank": rank, "document": task.index.document_id(document), "score": score}
                    for rank, document, score in rank_documents(values, shown.top)
                ]
                name = next(names)
                if wants_json(json):
                    record: RankingRecord = {
                        "schema": "stride.ranking/1",
                        "query": name,
                        "method": method,
                        "hits": hits,
                    }
                    emit(record)
                else:
                    cells = [
                        [str(hit["document"]), f"{hit['rank']:g}", f"{hit['score']:.6g}"] for hit in hits
                    ]
                    print_table(name, ["document", "rank", "score"], cells)
                bar.advance()
    if scores is not None:
        columns = task.n_chunks if scores.suffix else task.index.n_documents
        note(f"wrote {scores}: {len(chosen):,} × {columns:,} float32")


def _list_methods(json: bool | None) -> None:
    """Show every method with what it looks at."""
    from stride_cli.research.methods.registry import METHODS

    results = Results(json)
    for name, entry in METHODS.items():
        record: MethodRecord = {
            "schema": "stride.method/1",
            "method": name,
            "needs": entry.needs,
            "description": entry.description,
        }
        results.add(record, name, entry.needs, entry.description)
    results.show("attribution methods", ["method", "needs", "what it does"])
