"""`stride select`: the documents of a corpus that a task is best trained on."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stride_cli.attribution.options import SharingOptions
from stride_cli.commands.options import Asked, Flags, Json, with_flags
from stride_cli.research.selection.options import SelectOptions

if TYPE_CHECKING:
    from stride_cli.research.selection.records import SelectionRecord

SHARED_QUERIES = "Share the queries out to N processes; default: this one scores all."
EXAMPLE = """\b
Examples:
  stride select task.jsonl --index run.stride --size 1000 --out selection
  stride select task.jsonl --size 500 --method tfidf:ngrams=1 --out by-words
  stride evaluate selection selection --model base --queries heldout.jsonl
"""


@with_flags
def select(
    task: Annotated[
        Path,
        typer.Argument(
            metavar="TASK", help='Queries: {"id", "prompt", "response"} a line, or {"id", "text"}.'
        ),
    ],
    *,
    given: Annotated[dict[str, Any], Flags(SelectOptions, out={"default": Path("selection")})],
    shared: Annotated[dict[str, Any], Flags(SharingOptions, workers={"help": SHARED_QUERIES})],
    where: Asked,
    json: Json = None,
) -> None:
    """Choose training documents for a task, with equally many at random and by BM25 beside them."""
    import numpy as np

    from stride_cli.commands.tables import print_table
    from stride_cli.output import emit, note, wants_json
    from stride_cli.research.selection.select import run_selection

    options = SelectOptions(**given)
    size, started = options.size, time.perf_counter()
    opened, queries, found = run_selection(where, task, options, SharingOptions(**shared))
    lots = sum(bool(np.isnan(choice.rank)) for choice in found.chosen)
    if lots:
        note(
            f"{lots:,} of the {size:,} documents have no score above zero for any query and were drawn by "
            "lot: more queries, or a smaller --size, would do without"
        )
    theirs = {choice.document for choice in found.bm25}
    in_both = sum(choice.document in theirs for choice in found.chosen) / size
    record: SelectionRecord = {
        "schema": "stride.selection/1",
        "out": str(options.out),
        "size": size,
        "documents": opened.index.n_documents,
        "queries": len(queries),
        "method": options.method,
        "lots": lots,
        "shared_with_bm25": in_both,
        "seconds": time.perf_counter() - started,
    }
    if wants_json(json):
        emit(record)
        return
    rows = [
        [
            opened.index.document_id(choice.document),
            f"{choice.rank:g}",
            f"{choice.score:.4g}",
            queries.names[choice.query] if choice.query >= 0 else "–",
        ]
        for choice in found.chosen[:10]
    ]
    print_table(
        f"the first of {size:,} documents in {options.out}", ["document", "rank", "score", "query"], rows
    )
