"""Where results and talk go: data on stdout, everything else on stderr."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol


def wants_json(flag: bool) -> bool:
    """JSON Lines when asked for with --json, or when stdout is not a terminal."""
    return flag or not sys.stdout.isatty()


def to_json(record: Mapping[str, Any]) -> str:
    """One record as one line of strict JSON (a number that is not finite becomes null)."""
    return json.dumps(_finite(record), ensure_ascii=False, allow_nan=False)


def emit(record: Mapping[str, Any]) -> None:
    """Write one record to stdout as a JSON line, at once, so that the next program in a pipe can start."""
    sys.stdout.write(to_json(record) + "\n")
    sys.stdout.flush()


def note(text: str) -> None:
    """Say something to the person at the terminal (stderr)."""
    print(text, file=sys.stderr, flush=True)


class Ticker(Protocol):
    """What a long task calls as it goes on."""

    def advance(self, amount: float = 1) -> None: ...

    def describe(self, text: str) -> None: ...


class _Silent:
    def advance(self, amount: float = 1) -> None:
        pass

    def describe(self, text: str) -> None:
        pass


@contextmanager
def progress(description: str, total: float | None = None, *, unit: str = "") -> Iterator[Ticker]:
    """A progress bar on stderr with time left; silent where stderr is not a terminal.

    Parameters
    ----------
    description : str
        What is going on, two or three words.
    total : float, optional
        How many units the whole is; without it the bar only shows what is done.
    unit : str
        What is counted ("documents", "tokens").
    """
    if not sys.stderr.isatty() or os.environ.get("STRIDE_NO_PROGRESS"):
        yield _Silent()
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(unit),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    with bar:
        task = bar.add_task(description, total=total)

        class _Bar:
            def advance(self, amount: float = 1) -> None:
                bar.advance(task, amount)

            def describe(self, text: str) -> None:
                bar.update(task, description=text)

        yield _Bar()


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # NumPy scalar
        return _finite(value.item())
    return value
