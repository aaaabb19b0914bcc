"""Where results and talk go: data on stdout, everything else on stderr."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from stride_cli.characters import one_line, printable, printable_json
from stride_cli.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress


def settle_streams() -> None:
    """Make sure that there are stdin, stdout and stderr, and that whatever is written can be encoded.

    A closed one would be None, and the next file that is opened would take its number. Nothing is read from a
    closed stdin, and what is told a closed stderr is lost.

    Raises
    ------
    UsageError      stdout is closed: what is computed would be for nobody
    """
    if sys.stdin is None:
        sys.stdin = _nothing(0, "r")
    stdout_closed = sys.stdout is None
    if stdout_closed:
        sys.stdout = _nothing(1, "w")
    if sys.stderr is None:
        sys.stderr = _nothing(2, "w")
    for stream in (sys.stdout, sys.stderr):
        if getattr(stream, "errors", None) == "strict" and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    if stdout_closed:
        raise UsageError(
            "stdout is closed (expected a place for results)", fix="redirect it: > FILE, or > /dev/null"
        )


def _nothing(number: int, mode: str) -> Any:
    """An open /dev/null, as the file of this number where that is free."""
    descriptor = os.open(os.devnull, os.O_RDWR)
    if descriptor != number:
        os.dup2(descriptor, number)
        os.close(descriptor)
    return open(number, mode, encoding="utf-8", closefd=False)


def wants_json(flag: bool) -> bool:
    """JSON Lines when asked for with --json, or when stdout is not a terminal."""
    return flag or not sys.stdout.isatty()


def to_json(record: Mapping[str, Any]) -> str:
    """One record as one line of strict JSON (a number that is not finite becomes null), safe to show."""
    return printable_json(json.dumps(_finite(record), ensure_ascii=not _writes_utf8(), allow_nan=False))


def _writes_utf8() -> bool:
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return str(encoding).lower().replace("-", "").replace("_", "") == "utf8"


def emit(record: Mapping[str, Any]) -> None:
    """Write one record to stdout as a JSON line, at once, so that the next program in a pipe can start."""
    sys.stdout.write(to_json(record) + "\n")
    sys.stdout.flush()


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
    """From now on: a reader of stdout that leaves (`| head`) does not end the command, which has a file to
    write too."""
    if not isinstance(sys.stdout, _Lasting):
        sys.stdout = _Lasting(sys.stdout)


def note(text: str) -> None:
    """Say something to the person at the terminal (stderr)."""
    print(printable(text), file=sys.stderr, flush=True)


def console(*, stderr: bool = False) -> Console:
    """rich's console, which leaves it to `main` that the reader of a pipe has left, and never hides the
    cursor: Ctrl-C may end the process before it is shown again (`interrupts.at_once`)."""
    from rich.console import Console

    class _Console(Console):
        def on_broken_pipe(self) -> None:
            raise  # the BrokenPipeError, which is being handled where this is called

        def show_cursor(self, show: bool = True) -> bool:
            return False

    return _Console(stderr=stderr, highlight=False)


class Ticker(Protocol):
    """What a long task calls as it goes on."""

    def advance(self, amount: float = 1) -> None: ...

    def describe(self, text: str) -> None: ...


class _Silent:
    def advance(self, amount: float = 1) -> None:
        pass

    def describe(self, text: str) -> None:
        pass


_bars: Progress | None = None  # on the terminal now; a task within a task has its bar below
_listener: Callable[[str, float, float | None], None] | None = None


@contextmanager
def progress_told_to(listener: Callable[[str, float, float | None], None]) -> Iterator[None]:
    """Within: in place of a bar, `listener` is told what is going on, how much is done, and of how much."""
    global _listener
    before, _listener = _listener, listener
    try:
        yield
    finally:
        _listener = before


class _Told:
    """Tells `listener`."""

    def __init__(
        self, listener: Callable[[str, float, float | None], None], description: str, total: float | None
    ) -> None:
        self._listener, self._description, self._total, self._done = listener, description, total, 0.0
        listener(description, 0.0, total)

    def advance(self, amount: float = 1) -> None:
        self._done += amount
        self._listener(self._description, self._done, self._total)

    def describe(self, text: str) -> None:
        self._description = text


@contextmanager
def progress(description: str, total: float | None = None, *, unit: str = "") -> Iterator[Ticker]:
    """A progress bar on stderr with time left; silent where stderr is not a terminal.

    Parameters
    ----------
    description : str
        What is going on, two or three words.
    total : float, optional
        How many units the whole is; without it the bar only moves, and shows what is done and for how long.
    unit : str
        What is counted ("documents", "tokens").
    """
    global _bars
    if _listener is not None:
        yield _Told(_listener, description, total)
        return
    # while a bar is shown, stderr may be a file of rich's that does not say that it is a terminal
    if _bars is None and (not sys.stderr.isatty() or os.environ.get("STRIDE_NO_PROGRESS")):
        yield _Silent()
        return
    outermost, bars = _bars is None, _bars or _open_bars()
    if outermost:
        bars.start()
        _bars = bars
    task = bars.add_task(one_line(description), total=total, unit=one_line(unit))

    class _Bar:
        def advance(self, amount: float = 1) -> None:
            bars.advance(task, amount)

        def describe(self, text: str) -> None:
            bars.update(task, description=one_line(text))

    try:
        yield _Bar()
    finally:
        bars.remove_task(task)
        if outermost:
            _bars = None
            bars.stop()


def _open_bars() -> Progress:
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        Task,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.text import Text

    class _Done(MofNCompleteColumn):
        def render(self, task: Task) -> Text:
            return Text() if task.total is None and not task.completed else super().render(task)

    class _Left(TimeRemainingColumn):
        def render(self, task: Task) -> Text:
            return Text() if task.total is None else super().render(task)

    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        _Done(),
        TextColumn("{task.fields[unit]}", markup=False),
        TimeElapsedColumn(),
        _Left(),
        console=console(stderr=True),
        transient=True,
        # what is written to stdout meanwhile goes above the bars, where both are on one terminal; else rich
        # would write to the terminal what is for a file or a pipe
        redirect_stdout=sys.stdout.isatty(),
    )


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


def duration(seconds: float) -> str:
    """A time that is roughly known, in words: "about 40 seconds", "about 3 hours"."""
    for size, unit in ((86400, "day"), (3600, "hour"), (60, "minute"), (1, "second")):
        if seconds >= 1.5 * size or size == 1:
            count = max(1, round(seconds / size))
            count = count if count < 10 else round(count, -1)
            return f"about {count} {unit}{'s' * (count != 1)}"
    raise AssertionError
