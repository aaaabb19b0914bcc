"""End with one line on Ctrl-C, wherever it comes. Light: a process of `stride` imports it first."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

EXIT_INTERRUPTED = 130
_noticed = False


@contextmanager
def noticed() -> Iterator[None]:
    """Within: Ctrl-C raises KeyboardInterrupt, and is remembered, whatever becomes of that (`came`).

    Modules that are being imported turn it into errors of other kinds. Nothing is changed where Ctrl-C is
    handled by somebody else already, or ignored.
    """
    global _noticed
    _noticed = False
    with _handled_by(_notice, where=(signal.default_int_handler,)):
        yield


def came() -> bool:
    """Tell if Ctrl-C was pressed since `noticed` was entered."""
    return _noticed


@contextmanager
def at_once(*, where: tuple[Any, ...] = ()) -> Iterator[None]:
    """Within: Ctrl-C ends the process at once, with a line; for what only imports, and writes nothing.

    Some libraries abort when they are interrupted while they are imported. Only within `noticed`, unless
    `where` names other handlers that may be replaced.
    """
    with _handled_by(_end, where=where or (_notice,)):
        yield


@contextmanager
def _handled_by(handler: Any, where: tuple[Any, ...]) -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    if before not in where or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _notice(number: int, frame: FrameType | None) -> None:
    global _noticed
    _noticed = True
    raise KeyboardInterrupt


def _end(number: int, frame: FrameType | None) -> None:
    try:
        # over a bar, where there is one
        os.write(2, b"\r\x1b[Kinterrupted\n" if os.isatty(2) else b"interrupted\n")
    finally:
        os._exit(EXIT_INTERRUPTED)
