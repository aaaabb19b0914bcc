"""State of an unfinished pass, written so that a crash leaves the one before it."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch

from index_format.durable import PIECE_BYTES
from stride_cli.errors import StorageError


class SavedState:
    """The state of an unfinished pass in a file, saved now and then.

    Parameters
    ----------
    path : Path or None      None: nothing is saved
    seconds : float          how often, or rarer where writing takes long: K × p may be a gigabyte, and the
                             disk slow
    """

    def __init__(self, path: Path | None, seconds: float) -> None:
        self._path, self._seconds = path, seconds
        self._pause, self._last = seconds, time.monotonic()

    def load(self) -> dict[str, Any] | None:
        """Read what an interrupted pass has left; None where it left nothing."""
        if self._path is None or not self._path.exists():
            return None
        found: dict[str, Any] = torch.load(self._path, weights_only=True, mmap=False)
        return found

    @property
    def due(self) -> bool:
        """Whether it is time to save."""
        return self._path is not None and time.monotonic() - self._last > self._pause

    def save(self, state: dict[str, Any]) -> None:
        """Write the state; StorageError where that fails."""
        if self._path is None:
            return
        started = time.monotonic()
        save_atomically(state, self._path)
        self._last = time.monotonic()
        if self._seconds:
            self._pause = max(self._seconds, 20 * (self._last - started))


class _InPieces:
    """What torch.save may write its tensors to, each by one call: piece by piece to a file."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def write(self, data: bytes) -> int:
        view = memoryview(data).cast("B")
        for start in range(0, len(view), PIECE_BYTES):
            self._file.write(view[start : start + PIECE_BYTES])
        return len(view)

    def flush(self) -> None:
        self._file.flush()


@contextlib.contextmanager
def _without_checksums() -> Iterator[None]:
    """torch.load looks at none, and they take as long as the writing does."""
    from torch.serialization import get_crc32_options, set_crc32_options

    before = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(before)


def save_atomically(state: dict[str, object], path: Path) -> None:
    """torch.save beside the target, flushed to disk, then one rename.

    Raises
    ------
    StorageError      the disk is full or refuses; what was saved before is kept
    """
    temporary = path.with_suffix(".tmp")
    try:
        with temporary.open("wb") as file:
            with _without_checksums():
                torch.save(state, cast("BinaryIO", _InPieces(file)))  # it asks for no more of one
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except (OSError, RuntimeError) as error:  # torch reports a failed write as RuntimeError
        temporary.unlink(missing_ok=True)
        raise StorageError(
            f"the state of the fit could not be written to {path}: {error}".splitlines()[0],
            fix="free some space, then run the same command again: it goes on where it was last saved",
        ) from error
