"""State of an unfinished pass, written so that a crash leaves the one before it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from index_format.durable import replacing
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
        """True where it is time to save."""
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


def save_atomically(state: dict[str, Any], path: Path) -> None:
    """Write a state beside the target, flush it to disk, and rename it.

    Raises
    ------
    StorageError      the disk is full or refuses; what was saved before is kept
    """
    try:
        with replacing(path) as fresh:
            torch.save(state, fresh)
    except (OSError, RuntimeError) as error:  # torch reports a failed write as RuntimeError
        raise StorageError(
            f"the state of the fit could not be written to {path}: {error}".splitlines()[0],
            fix="free some space, then run the same command again: it goes on where it was last saved",
        ) from error
