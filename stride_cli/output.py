"""Output: data on stdout, everything else on stderr."""

from __future__ import annotations

import io
import json
import logging
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from stride_cli.characters import one_line, printable, printable_json
from stride_cli.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress


def settle_streams() -> None:
    """Open stdin, stdout and stderr where they are closed, and let whatever is written be encoded.

    A closed one would be None, and the next file that is opened would take its number.

    Raises
    ------
    UsageError      stdout is closed: what is computed would be for nobody
    """
    stdout_closed = sys.stdout is None
    sys.stdin = sys.stdin or _nothing(0, "r")
    sys.stdout = sys.stdout or _nothing(1, "w")
    sys.stderr = sys.stderr or _nothing(2, "w")
    if isinstance(raw := getattr(sys.stdout, "buffer", None), io.RawIOBase):  # where short writes go unseen
        sys.stdout = io.TextIOWrapper(io.BufferedWriter(raw), sys.stdout.encoding, line_buffering=True)
    for stream in (sys.stdout, sys.stderr):
        if getattr(stream, "errors", None) == "strict" and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    if stdout_closed:
        found = "stdout is closed (expected a place for results)"
        raise UsageError(found, fix="redirect it: > FILE, or > /dev/null")


def _nothing(number: int, mode: str) -> Any:
    """An open /dev/null, as the file of this number where that is free."""
    descriptor = os.open(os.devnull, os.O_RDWR)
    if descriptor != number:
        os.dup2(descriptor, number)
        os.close(descriptor)
    return open(number, mode, encoding="utf-8", closefd=False)


def wants_json(flag: bool | None) -> bool:
    """True where JSON Lines are asked for with --json, or stdout is no terminal and --text is not given."""
    return not sys.stdout.isatty() if flag is None else flag


def to_json(record: Mapping[str, Any]) -> str:
    """Write a record as one line of strict JSON (a number that is not finite becomes null), safe to show."""
    encoding = str(getattr(sys.stdout, "encoding", None) or "utf-8")
    in_utf8 = encoding.lower().replace("-", "").replace("_", "") == "utf8"
    return printable_json(json.dumps(_finite(record), ensure_ascii=not in_utf8, allow_nan=False))


def emit(record: Mapping[str, Any]) -> None:
    """Write one record to stdout as a JSON line, at once, so that the next program in a pipe can start."""
    sys.stdout.write(to_json(record) + "\n")
    sys.stdout.flush()


class _Notes(logging.Handler):
    """Shows notes on stderr, whatever that is by then."""

    def emit(self, record: logging.LogRecord) -> None:
        print(printable(record.getMessage()), file=sys.stderr, flush=True)


_LOGGER = logging.getLogger("stride")
_LOGGER.addHandler(_Notes())
_LOGGER.propagate = False
_LOGGER.setLevel(logging.INFO)


def note(text: str) -> None:
    """Say something to the person at the terminal (stderr), by the logger "stride"."""
    _LOGGER.log(logging.WARNING if text.startswith("warning") else logging.INFO, "%s", text)


def quiet(on: bool = True) -> None:
    """Show neither progress nor notes but for warnings; with False, show them again."""
    _LOGGER.setLevel(logging.WARNING if on else logging.INFO)
    os.environ["STRIDE_NO_PROGRESS"] = "1" if on else ""


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


class Ticker:
    """Progress that a long task reports; this one tells nobody."""

    _reached = 0.0

    def advance(self, amount: float = 1) -> None:
        """So many units more are done."""

    def reach(self, done: float) -> None:
        """So many units are done in all."""
        self.advance(done - self._reached)
        self._reached = done

    def describe(self, text: str) -> None:
        """From now on something else is going on."""


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


class _Told(Ticker):
    """Tells a listener."""

    def __init__(self, listener: Callable[[str, float, float | None], None], text: str, total: float | None):
        self._listener, self._text, self._total, self._done = listener, text, total, 0.0
        self.advance(0)

    def advance(self, amount: float = 1) -> None:
        self._done += amount
        self._listener(self._text, self._done, self._total)

    def describe(self, text: str) -> None:
        self._text = text


class _Bar(Ticker):
    """Moves one bar of several."""

    def __init__(self, bars: Progress, text: str, total: float | None, unit: str) -> None:
        self._bars = bars
        self.task = bars.add_task(one_line(text), total=total, unit=one_line(unit))

    def advance(self, amount: float = 1) -> None:
        self._bars.advance(self.task, amount)

    def describe(self, text: str) -> None:
        self._bars.update(self.task, description=one_line(text))


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
        yield Ticker()
        return
    outermost, bars = _bars is None, _bars or _open_bars()
    if outermost:
        bars.start()
        _bars = bars
    bar = _Bar(bars, description, total, unit)
    try:
        yield bar
    finally:
        bars.remove_task(bar.task)
        if outermost:
            _bars = None
            bars.stop()


def _open_bars() -> Progress:
    from rich import progress as rich

    return rich.Progress(
        rich.TextColumn("{task.description}", markup=False),
        rich.BarColumn(),
        rich.MofNCompleteColumn(),
        rich.TextColumn("{task.fields[unit]}", markup=False),
        rich.TimeElapsedColumn(),
        rich.TimeRemainingColumn(),
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
    units = ((86400, "day"), (3600, "hour"), (60, "minute"), (1, "second"))
    size, unit = next(each for each in units if seconds >= 1.5 * each[0] or each[0] == 1)
    count = max(1, round(seconds / size))
    count = count if count < 10 else round(count, -1)
    return f"about {count} {unit}{'s' * (count != 1)}"
