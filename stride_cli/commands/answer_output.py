"""Where answers of `stride query` go: a terminal, JSON, a table; stdout or a file."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from index_format.durable import replacing
from stride_cli import output
from stride_cli.attribution.options import FORMATS, FormatOptions
from stride_cli.errors import UsageError

if TYPE_CHECKING:
    from stride_cli.formats.table_files import Table


class AnswerOutput:
    """How answers are written, and where; checked before anything is computed.

    Parameters
    ----------
    wanted : FormatOptions
    json : bool         --json

    Attributes
    ----------
    format : "jsonl", "json", "csv", "parquet"; "text" on a terminal
    out : Path, optional        else stdout

    Raises
    ------
    UsageError      the two disagree, the file cannot be written, or Parquet would go to a terminal
    MissingExtraError       of Parquet, without pyarrow
    """

    def __init__(self, wanted: FormatOptions, json: bool) -> None:
        self.out = None if wanted.out is None else Path(wanted.out)
        format = wanted.format or (None if self.out is None else _kind(self.out))
        if json and format not in (None, "json", "jsonl"):
            raise UsageError(f"--json writes JSON lines, and the format is {format}", fix="drop one of them")
        lines = output.wants_json(json) or self.out is not None
        self.format = format or ("jsonl" if lines else "text")
        if self.out is not None:
            from stride_cli.report.drawing import check_place

            check_place(self.out)
        if self.format == "parquet":
            from stride_cli.formats.table_files import require_pyarrow

            require_pyarrow()
            if self.out is None and sys.stdout.isatty():
                raise UsageError(
                    "Parquet is no text to show on a terminal (expected a file)",
                    fix="give one with --out hits.parquet, or redirect stdout",
                )

    @property
    def as_json(self) -> bool:
        """Whether what could not be answered can be a record among the answers."""
        return self.format in ("jsonl", "json")

    @contextmanager
    def opened(self) -> Iterator[Callable[[Mapping[str, Any]], None]]:
        """What takes one record after the other; a file is there once all of them are in it."""
        if self.format in ("csv", "parquet"):
            from stride_cli.formats.columns import hit_columns
            from stride_cli.formats.table_files import CsvTable, parquet_to, table_at

            with ExitStack() as stack:
                if self.out is not None:
                    table = stack.enter_context(table_at(self.format, hit_columns(), self.out))
                elif self.format == "csv":
                    table = CsvTable(hit_columns(), sys.stdout)
                else:
                    table = stack.enter_context(parquet_to(hit_columns(), sys.stdout.buffer))
                yield _rows(table)
        elif self.out is None:
            with _json(self.format, sys.stdout) as take:
                yield take
        else:
            with (
                replacing(self.out) as fresh,
                fresh.open("x", encoding="utf-8") as text,
                _json(self.format, text) as take,
            ):
                yield take


def _kind(path: Path) -> str | None:
    from stride_cli.formats.table_files import kind_by_suffix

    return kind_by_suffix(path, FORMATS)


def _rows(table: Table) -> Callable[[Mapping[str, Any]], None]:
    from stride_cli.formats.columns import hit_rows

    numbers = count(1)
    return lambda answer: table.add(hit_rows(answer, next(numbers)))


@contextmanager
def _json(format: str, out: IO[str]) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """Lines of JSON, or one array, a record a line; each at once, so that the next in a pipe can start."""
    places = count()

    def take(record: Mapping[str, Any]) -> None:
        line = output.to_json(record)
        if format == "json":
            out.write((",\n" if next(places) else "[\n") + line)
        else:
            out.write(line + "\n")
        out.flush()

    yield take
    if format == "json":
        out.write("\n]\n" if next(places) else "[]\n")
        out.flush()
