"""`stride select`: the documents of a corpus that a task is best trained on."""

from __future__ import annotations

import time
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stride_cli.commands.completion import complete_method
from stride_cli.commands.options import Device, Dtype, IndexPath, Json, ModelPath, find_index

if TYPE_CHECKING:
    from stride_cli.schema.selection_records import SelectionRecord

EXAMPLE = """\b
Examples:
  stride select task.jsonl --index run.stride --size 1000 --out selection
  stride select task.jsonl --size 500 --by sum --method tfidf:ngrams=1 --out by-words
  stride evaluate selection selection --model base --queries heldout.jsonl
"""


class By(StrEnum):
    """How the scores of many queries become one order."""

    greedy = "greedy"
    sum = "sum"
    quota = "quota"


def select(
    task: Annotated[
        Path,
        typer.Argument(
            metavar="TASK", help='Queries: {"id", "prompt", "response"} a line, or {"id", "text"}.'
        ),
    ],
    size: Annotated[int, typer.Option("--size", help="Documents to choose.")] = 1000,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Where the three files go.")] = Path(
        "selection"
    ),
    by: Annotated[
        By,
        typer.Option(
            "--by",
            help='greedy: best rank over queries; sum: of scores; quota: tasks in turn (by "task").',
        ),
    ] = By.greedy,
    method: Annotated[
        str,
        typer.Option(
            "--method",
            help="Whose scores: a method of stride baseline --list, with options.",
            autocompletion=complete_method,
        ),
    ] = "stride",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a selection at DIR.")] = False,
    index: IndexPath = None,
    model: ModelPath = None,
    device: Device = None,
    dtype: Dtype = None,
    json: Json = False,
) -> None:
    """Choose training documents for a task, with equally many at random and by BM25 beside them."""
    import numpy as np

    from stride_cli.commands.tables import print_table
    from stride_cli.config import resolve
    from stride_cli.data.workspace import WorkspacePath
    from stride_cli.output import emit, note, wants_json
    from stride_cli.selection.select import run_selection

    started = time.perf_counter()
    path = find_index(index)
    general = resolve("general", {"model": model})
    where = WorkspacePath(path, general.model, device or "auto", dtype or "auto")
    opened, queries, found = run_selection(
        where, task, size=size, method=method, by=by.value, out=out, overwrite=overwrite
    )
    lots = sum(bool(np.isnan(choice.rank)) for choice in found.chosen)
    if lots:
        note(
            f"{lots:,} of the {size:,} documents have no score above zero for any query and were drawn by "
            "lot: more queries, or a smaller --size, would do without"
        )
    theirs = {choice.document for choice in found.bm25}
    shared = sum(choice.document in theirs for choice in found.chosen) / size
    record: SelectionRecord = {
        "schema": "stride.selection/1",
        "out": str(out),
        "size": size,
        "documents": opened.index.n_documents,
        "queries": len(queries),
        "method": method,
        "by": by.value,
        "lots": lots,
        "shared_with_bm25": shared,
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
    print_table(f"the first of {size:,} documents in {out}", ["document", "rank", "score", "query"], rows)
