"""Options and output that the commands of `stride evaluate` and `stride baseline` share."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stride_cli import output
from stride_cli.attribution.options import SharingOptions
from stride_cli.commands.options import Flags
from stride_cli.errors import EXIT_USAGE, UsageError
from stride_cli.research.evaluation.options import BenchOptions, LdsOptions

if TYPE_CHECKING:
    from stride_cli.data.workspace import WorkspacePath
    from stride_cli.research.evaluation.bench import Bench

Measured = Annotated[dict[str, Any], Flags(BenchOptions)]
Compared = Annotated[dict[str, Any], Flags(LdsOptions)]
SharedMethods = Annotated[
    dict[str, Any],
    Flags(
        SharingOptions,
        workers={"help": "Run so many methods at a time, each in processes of its own; default: one."},
    ),
]
Html = Annotated[
    Path | None, typer.Option("--html", help="Also write a page with the plots (self-contained).")
]


def open_bench(where: WorkspacePath, options: BenchOptions, *, alpha: float | None = None) -> Bench:
    """Open index, truth and queries as the shared options name them."""
    from stride_cli.research.evaluation.bench import Bench

    return Bench(where, queries=options.queries, alpha=alpha, chat=options.chat)


class Results:
    """Records on stdout as JSON Lines, or else one table at the end."""

    def __init__(self, json: bool | None) -> None:
        self.json = output.wants_json(json)
        self.rows: list[list[str]] = []
        self._failed = self._all = 0

    def add(self, record: Mapping[str, Any], *cells: str) -> None:
        """Write a record, or keep its row of the table."""
        if self.json:
            output.emit(record)
        self.rows.append(list(cells))

    def count(self, method: str, error: str | None, fix: str | None) -> None:
        """Count a method; say on stderr why it failed, if it did."""
        self._all += 1
        if error is not None:
            self._failed += 1
            output.note(f"{method} failed: {error}" + (f"\n  fix: {fix}" if fix else ""))

    def show(self, title: str, columns: Sequence[str]) -> None:
        """Print the table, unless records were written."""
        from stride_cli.commands.tables import print_table

        if not self.json:
            print_table(title, columns, self.rows)

    def close(self) -> None:
        """End the command with an error where every method failed."""
        if self._failed and self._failed == self._all:
            raise typer.Exit(EXIT_USAGE)


def listed(name: str, text: str, kind: Callable[[str], Any] = int, *, example: str = "10,50") -> list[Any]:
    """Parse values separated by commas, each once, in their order.

    Raises
    ------
    UsageError      a value of another kind, or none
    """
    try:
        found = list(dict.fromkeys(kind(part.strip()) for part in text.split(",") if part.strip()))
    except ValueError:
        found = []
    if not found:
        what = "whole numbers" if kind is int else "values"
        raise UsageError(
            f"{name} is '{text}' (expected {what} separated by commas)", fix=f"try {name} {example}"
        )
    return found


def with_error(found: Mapping[str, Any], digits: int = 3) -> str:
    """``0.412 ± 0.020 [0.37, 0.45]``; – where the method failed; of one value no error is known."""
    if found.get("mean") is None:
        return "–"
    if found["se"] is None or not isfinite(found["se"]):
        return f"{found['mean']:+.{digits}f}"
    low, high = f"{found['low']:+.{digits}f}", f"{found['high']:+.{digits}f}"
    return f"{found['mean']:+.{digits}f} ± {found['se']:.{digits}f} [{low}, {high}]"


class _Lasting:
    """A stream that takes what is written, whether or not its reader is still there."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with self._or_nowhere():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._or_nowhere():
            self._stream.flush()

    @contextmanager
    def _or_nowhere(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:  # what comes now, and what is still in the buffer, goes to nobody
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def outlast_reader() -> None:
    """Keep a command going when the reader of its stdout leaves (`| head`)."""
    if not isinstance(sys.stdout, _Lasting):
        sys.stdout = _Lasting(sys.stdout)


def seconds(value: float | None) -> str:
    """Seconds with three digits that matter."""
    return "–" if value is None else f"{value:.3g} s"
