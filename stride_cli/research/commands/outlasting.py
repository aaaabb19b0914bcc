"""A stdout whose reader may leave before a command is done that has a file to write too."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


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
