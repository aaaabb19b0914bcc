"""`stride export`: saved answers and audits as a database or a table."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stride_cli.commands.options import Flags, Json, with_flags
from stride_cli.errors import UsageError
from stride_cli.formats.options import TARGETS, ExportOptions

if TYPE_CHECKING:
    from stride_cli.schema.answer_records import ExportRecord

EXAMPLE = """\b
Examples:
  stride query --file prompts.jsonl --json > answers.jsonl; stride export answers.jsonl --out answers.sqlite
  stride audit benchmark.jsonl --json | stride export - --to parquet --out leaks.parquet
"""


@with_flags
def export(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILES...", help="What stride query --json or stride audit --json printed; - for stdin."
        ),
    ],
    out: Annotated[Path, typer.Option("--out", help="The file to write.", metavar="FILE")],
    *,
    chosen: Annotated[dict[str, Any], Flags(ExportOptions)],
    json: Json = False,
) -> None:
    """Write saved answers or audits as a SQLite database, a CSV or a Parquet file.

    SQLite: tables of answers, of their hits, and of items of audits, with full-text search: datasette
    answers.sqlite shows them. CSV and Parquet: one row a hit, or an item. stride schema describes columns.
    """
    from stride_cli.formats.export import export as write
    from stride_cli.formats.table_files import kind_by_suffix
    from stride_cli.output import emit, note, wants_json
    from stride_cli.report.drawing import check_place

    begin = time.monotonic()
    kind = ExportOptions(**chosen).to or kind_by_suffix(out, TARGETS)
    if kind is None:
        raise UsageError(
            f"the name '{out}' says no format (expected .sqlite, .csv or .parquet)", fix="--to sqlite"
        )
    check_place(out)
    with ExitStack() as stack:
        counts = write(_opened(files, stack), kind, out)
    record: ExportRecord = {
        "schema": "stride.export/1",
        "path": str(out),
        "to": kind,
        "answers": counts["answers"],
        "hits": counts["hits"],
        "audited": counts["audited"],
        "bad_inputs": counts["bad_inputs"],
        "bytes": out.stat().st_size,
        "seconds": time.monotonic() - begin,
    }
    if wants_json(json):
        emit(record)
        return
    told = f"{record['answers']:,} answers with {record['hits']:,} hits" if record["answers"] else ""
    items = f"{record['audited']:,} items of audits" if record["audited"] else ""
    note(f"wrote {out}: {', '.join(filter(None, (told, items)))}, {record['bytes'] / 1024:,.0f} KiB")


def _opened(files: list[Path], stack: ExitStack) -> Iterator[tuple[str, Iterable[str]]]:
    """Each file's name and lines; all are looked for before the first is read."""
    from stride_cli.commands.prompts import stdin_lines

    for file in files:
        if str(file) != "-" and (not file.exists() or file.is_dir()):
            raise UsageError(
                f"there is no file '{file}'", fix="save answers with: stride query … --json > FILE"
            )
    for file in files:
        if str(file) == "-":
            yield "stdin", stdin_lines()
        else:
            yield str(file), stack.enter_context(file.open(encoding="utf-8", errors="surrogateescape"))
