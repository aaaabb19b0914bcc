"""Files compared with their SHA-256 when they are first touched, and which of them need not be again.

A file is read whole once. The outcome is kept in the user's cache directory under what the system says of the
file: device, inode, length, times of its content and of its entry. Whoever writes into a file changes these,
and it is read again. A disk that loses bits silently does not: `stride index verify` reads everything.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Iterable
from pathlib import Path

from index_format.confined import own_directory
from index_format.errors import RESTORE, IndexDamaged

_WORTH_BYTES = 1 << 20  # less is read again sooner than it is looked up
_KEPT_SECONDS = 90 * 24 * 3600  # an index that nobody asks for so long is read again
_FRESH_NS = 20_000_000  # what was written less than that ago could change without its time changing
_COMPACT = 50_000  # lines, most of which are of files that are gone

Identity = tuple[str, int, int, int, int, int]  # SHA-256, device, inode, length, times in ns


class Soundness:
    """Outcomes for the files below one directory.

    Parameters
    ----------
    root : Path      absolute
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._known: set[Identity] | None = None

    def check(self, name: str, opened: os.stat_result, content: memoryview, sha256: str) -> None:
        """Raise IndexDamaged where file `name`, below the directory, is not sound."""
        if not self.is_sound(opened, content, sha256):
            raise IndexDamaged(
                f"{self._root / name} has other content than the manifest records", fix=RESTORE
            )

    def is_sound(self, opened: os.stat_result, content: memoryview, sha256: str) -> bool:
        """Compare a file with its manifest's digest, unless that was done since it last changed.

        Parameters
        ----------
        opened : what the system said of the file when it was mapped
        content : all of it, mapped
        """
        found = _identity(sha256, opened)
        if len(content) >= _WORTH_BYTES and found in self._remembered():
            return True
        if hashlib.sha256(content).hexdigest() != sha256:
            return False
        self._remember([found])
        return True

    def wrote(self, files: Iterable[tuple[str, str]]) -> None:
        """Take over the digests of files, (name, SHA-256), from whoever has just written them."""
        found = []
        for name, sha256 in files:
            with contextlib.suppress(OSError):
                found.append(_identity(sha256, (self._root / name).lstat()))
        self._remember(found)

    def _remembered(self) -> set[Identity]:
        if self._known is None:
            self._known = set()
            place = self._place()
            if place is not None and place.is_file() and own_directory(place.parent):
                with contextlib.suppress(OSError, ValueError):
                    lines = place.read_text(encoding="ascii").splitlines()
                    self._known.update(_parse(line) for line in lines)
                    if len(lines) > _COMPACT:
                        place.unlink()
        return self._known

    def _remember(self, found: Iterable[Identity]) -> None:
        settled = time.time_ns() - _FRESH_NS
        new = [each for each in found if each[3] >= _WORTH_BYTES and max(each[4:]) < settled]
        if not new:
            return
        self._remembered().update(new)
        place = self._place()
        if place is None or not own_directory(place.parent):
            return
        lines = "".join(" ".join(map(str, each)) + "\n" for each in new)
        with contextlib.suppress(OSError):  # without a home, or with a full disk, it is not kept
            if not place.exists():
                _forget_old(place.parent)
            handle = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
            with os.fdopen(handle, "wb") as file:
                file.write(lines.encode("ascii"))

    def _place(self) -> Path | None:
        """Return the file that keeps the outcomes; None for a user without a cache directory."""
        import platformdirs

        home = Path(platformdirs.user_cache_dir("stride", appauthor=False), "checked")
        name = hashlib.sha256(os.fsencode(self._root)).hexdigest()[:32]
        return home / name if home.is_absolute() else None


def _identity(sha256: str, found: os.stat_result) -> Identity:
    return (sha256, found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def _parse(line: str) -> Identity:
    sha256, *numbers = line.split(" ")
    device, inode, size, changed, entry = map(int, numbers)
    return (sha256, device, inode, size, changed, entry)


def _forget_old(home: Path) -> None:
    limit = time.time() - _KEPT_SECONDS
    for file in home.iterdir():
        if file.stat().st_mtime < limit:
            file.unlink()
