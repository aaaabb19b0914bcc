"""Answers of `stride query` on stdout: for people, as JSON, or as a table."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from typing import Any

from stride_cli import output
from stride_cli.attribution.options import FormatOptions
from stride_cli.errors import UsageError


class AnswerOutput:
    """The format of answers on stdout, checked before anything is computed.

    Attributes
    ----------
    format : "jsonl", "json", "csv"; "text" on a terminal

    Raises
    ------
    UsageError      --json, and a format that is no JSON
    """

    def __init__(self, wanted: FormatOptions, json: bool) -> None:
        if json and wanted.format == "csv":
            raise UsageError("--json writes JSON lines, and the format is csv", fix="drop one of them")
        self.format = wanted.format or ("jsonl" if output.wants_json(json) else "text")

    @property
    def as_json(self) -> bool:
        """Whether what could not be answered can be a record among the answers."""
        return self.format in ("jsonl", "json")

    @contextmanager
    def opened(self) -> Iterator[Callable[[Mapping[str, Any]], None]]:
        """Yield what takes one record after the other."""
        if self.format == "csv":
            from stride_cli.attribution.frames import CsvTable

            yield CsvTable(sys.stdout).add
        elif self.format == "json":
            places = count()

            def take(record: Mapping[str, Any]) -> None:
                sys.stdout.write((",\n" if next(places) else "[\n") + output.to_json(record))

            yield take
            sys.stdout.write("\n]\n" if next(places) else "[]\n")
        else:
            yield output.emit
