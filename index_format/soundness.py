"""Files compared with their SHA-256 when they are first touched, and which of them need not be again.

A file is read whole once. The outcome is kept in the user's cache directory with what the system says of the
file: device, inode, length, times of its content and of its entry. Whoever writes into a file changes these,
and it is read again. A disk that loses bits silently does not: `stride index verify` reads everything.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from index_format.confined import own_directory
from index_format.durable import replace_file
from index_format.errors import RESTORE, IndexDamaged

_WORTH_BYTES = 1 << 20  # less is read again sooner than it is looked up
_KEPT_SECONDS = 90 * 24 * 3600  # an index that nobody asks for so long is read again
_FRESH_NS = 20_000_000  # what was written less than that ago could change without its time changing


class Soundness:
    """Outcomes for the files below one directory.

    Parameters
    ----------
    root : Path      absolute
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    def check(self, name: str, opened: os.stat_result, content: memoryview, sha256: str) -> None:
        """Raise IndexDamaged where file `name`, below the directory, is not sound."""
        if not self.is_sound(name, opened, content, sha256):
            raise IndexDamaged(
                f"{self._root / name} has other content than the manifest records", fix=RESTORE
            )

    def is_sound(self, name: str, opened: os.stat_result, content: memoryview, sha256: str) -> bool:
        """Compare a file with its manifest's digest, unless that was done since it last changed.

        Parameters
        ----------
        name : below the directory
        opened : what the system said of the file when it was mapped
        content : all of it, mapped
        """
        found = [sha256, *_identity(opened)]
        if len(content) >= _WORTH_BYTES and self._remembered().get(name) == found:
            return True
        if hashlib.sha256(content).hexdigest() != sha256:
            return False
        self._remember({name: found})
        return True

    def wrote(self, files: Iterable[tuple[str, str]]) -> None:
        """Take over the digests of files, (name, SHA-256), from whoever has just written them."""
        found: dict[str, list[Any]] = {}
        for name, sha256 in files:
            with contextlib.suppress(OSError):
                found[name] = [sha256, *_identity((self._root / name).lstat())]
        self._remember(found)

    def _remembered(self) -> dict[str, list[Any]]:
        place = self._place()
        if place is None or not place.is_file() or not own_directory(place.parent):
            return {}
        try:
            found = json.loads(place.read_bytes())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def _remember(self, found: dict[str, list[Any]]) -> None:
        settled = time.time_ns() - _FRESH_NS
        new = {
            name: entry
            for name, entry in found.items()
            if entry[3] >= _WORTH_BYTES and max(entry[4:]) < settled
        }
        place = self._place()
        if not new or place is None or not own_directory(place.parent):
            return
        with contextlib.suppress(OSError):  # without a home, or with a full disk, it is not kept
            for file in place.parent.iterdir():
                if file.stat().st_mtime < time.time() - _KEPT_SECONDS:
                    file.unlink()
            replace_file(place, json.dumps(self._remembered() | new).encode())

    def _place(self) -> Path | None:
        """Return the file that keeps the outcomes; None for a user without a cache directory."""
        import platformdirs

        home = Path(platformdirs.user_cache_dir("stride", appauthor=False), "checked")
        name = hashlib.sha256(os.fsencode(self._root)).hexdigest()[:32]
        return home / name if home.is_absolute() else None


def _identity(found: os.stat_result) -> tuple[int, ...]:
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
