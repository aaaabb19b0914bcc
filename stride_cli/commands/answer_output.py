"""Where answers of `stride query` go: a terminal, JSON, a table; stdout or a file."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import IO, Any

from index_format.durable import replacing
from stride_cli import output
from stride_cli.attribution.options import FormatOptions
from stride_cli.errors import UsageError

_SUFFIXES = {".csv": "csv", ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json"}
_TABLES = {".parquet", ".pq", ".sqlite", ".sqlite3", ".db"}


class AnswerOutput:
    """How answers are written, and where; checked before anything is computed.

    Parameters
    ----------
    wanted : FormatOptions
    json : bool         --json

    Attributes
    ----------
    format : "jsonl", "json", "csv"; "text" on a terminal
    out : Path, optional        else stdout

    Raises
    ------
    UsageError      the two disagree, or the file cannot be written
    """

    def __init__(self, wanted: FormatOptions, json: bool) -> None:
        self.out = None if wanted.out is None else Path(wanted.out)
        if wanted.format is None and self.out is not None and self.out.suffix.lower() in _TABLES:
            raise UsageError(
                f"answers are not written as {self.out.suffix} (expected .csv, .jsonl or .json)",
                fix="write .csv, which pandas and `sqlite-utils insert --csv` read",
            )
        format = wanted.format or (None if self.out is None else _SUFFIXES.get(self.out.suffix.lower()))
        if json and format not in (None, "json", "jsonl"):
            raise UsageError(f"--json writes JSON lines, and the format is {format}", fix="drop one of them")
        lines = output.wants_json(json) or self.out is not None
        self.format = format or ("jsonl" if lines else "text")
        if self.out is not None:
            from stride_cli.report.drawing import check_place

            check_place(self.out)

    @property
    def as_json(self) -> bool:
        """Whether what could not be answered can be a record among the answers."""
        return self.format in ("jsonl", "json")

    @contextmanager
    def opened(self) -> Iterator[Callable[[Mapping[str, Any]], None]]:
        """What takes one record after the other; a file is there once all of them are in it."""
        if self.out is None:
            with self._written_to(sys.stdout) as take:
                yield take
            return
        with (
            replacing(self.out) as fresh,
            fresh.open("x", encoding="utf-8", newline="") as text,
            self._written_to(text) as take,
        ):
            yield take

    @contextmanager
    def _written_to(self, out: IO[str]) -> Iterator[Callable[[Mapping[str, Any]], None]]:
        if self.format == "csv":
            from stride_cli.formats.frames import CsvTable

            yield CsvTable(out).add
            return
        with _json(self.format, out) as take:
            yield take


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
