"""Files compared with their SHA-256 when they are first touched, and which of them need not be again.

A file is read whole once. That it was sound is kept in the user's cache directory as an empty file. Its name
is a digest of what the system says of the file: device, inode, length, times of its content and of its entry.
Whoever writes into a file changes these, and it is read again. A disk that loses bits silently does not:
`stride index verify` reads everything.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Iterable
from pathlib import Path

from index_format.confined import own_directory

_WORTH_BYTES = 1 << 20  # less is read again sooner than it is looked up
_KEPT_SECONDS = 90 * 24 * 3600  # an index that nobody asks for so long is read again
_FRESH_NS = 20_000_000  # what was written less than that ago could change without its time changing


def is_sound(opened: os.stat_result, content: memoryview, sha256: str) -> bool:
    """Compare a file with its manifest's digest, unless that was done since it last changed.

    Parameters
    ----------
    opened : what the system said of the file when it was mapped
    content : all of it, mapped
    """
    place = _place(opened, sha256)
    if place is not None and place.is_file() and own_directory(place.parent):
        return True
    if hashlib.sha256(content).hexdigest() != sha256:
        return False
    _keep(opened, sha256)
    return True


def wrote(root: Path, files: Iterable[tuple[str, str]]) -> None:
    """Take over the digests of files, (name below `root`, SHA-256), from whoever has just written them."""
    for name, sha256 in files:
        with contextlib.suppress(OSError):
            _keep((root / name).lstat(), sha256)


def _keep(found: os.stat_result, sha256: str) -> None:
    place = _place(found, sha256)
    fresh = max(found.st_mtime_ns, found.st_ctime_ns) >= time.time_ns() - _FRESH_NS
    if place is None or fresh or not own_directory(place.parent):
        return
    with contextlib.suppress(OSError):  # without a home, or with a full disk, it is not kept
        for file in place.parent.iterdir():
            if file.stat().st_mtime < time.time() - _KEPT_SECONDS:
                file.unlink()
        place.touch()


def _place(found: os.stat_result, sha256: str) -> Path | None:
    """Return the file that says that another is sound; None of a small one, or without a cache directory."""
    import platformdirs

    home = Path(platformdirs.user_cache_dir("stride", appauthor=False), "checked")
    if found.st_size < _WORTH_BYTES or not home.is_absolute():
        return None
    identity = (sha256, found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
    return home / hashlib.sha256(repr(identity).encode()).hexdigest()[:32]
