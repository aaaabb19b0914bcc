"""Share short work out to threads that stay: starting a thread takes as long as a piece of work."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from typing import Any, TypeVar

_Piece = TypeVar("_Piece")
_Result = TypeVar("_Result")

_lock = threading.Lock()
_pool: ThreadPoolExecutor | None = None


def start(function: Callable[..., _Result], *given: Any) -> Future[_Result]:
    """Have another thread do a piece; see `each`."""
    return _workers().submit(function, *given)


def settle(tasks: Iterable[Future[Any]]) -> None:
    """Wait for pieces; the first error of one is raised once none is at work any more.

    Those that have not begun where the caller itself fails are done all the same: they are short.
    """
    errors = [error for task in tasks if (error := task.exception()) is not None]
    if errors:
        raise errors[0]


def each(function: Callable[[_Piece], _Result], pieces: Sequence[_Piece]) -> list[_Result]:
    """Apply a function to every piece, in order; the calling thread does the first.

    Pieces must not ask for threads themselves: all might wait for one another.
    """
    if len(pieces) <= 1:
        return [function(piece) for piece in pieces]
    waiting = [start(function, piece) for piece in pieces[1:]]
    try:
        first = function(pieces[0])
    finally:
        settle(waiting)  # nobody writes where the caller may read or free by now
    return [first, *(task.result() for task in waiting)]


def stretches(count: int, pieces: int) -> list[slice]:
    """Cut `count` things into at most `pieces` consecutive slices, none empty."""
    pieces = max(1, min(pieces, count))
    ends = [count * number // pieces for number in range(pieces + 1)]
    return [slice(first, last) for first, last in pairwise(ends) if first < last]


def _workers() -> ThreadPoolExecutor:
    global _pool
    with _lock:
        if _pool is None:
            _pool = ThreadPoolExecutor(max(1, os.cpu_count() or 1), thread_name_prefix="stride")
        return _pool


def _forget() -> None:
    """Forget the threads in a forked process: they did not come along."""
    global _pool, _lock
    _pool, _lock = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
