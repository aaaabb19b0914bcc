"""Files below one directory, and nothing outside it: no link is followed, nothing but plain files is opened.

An index may come from anybody. A link in it could make a build write over its owner's files and a reader read
them; a FIFO or a device would never end. So what lies below an index is opened one directory after the other,
each relative to the one before, and whatever is neither a directory nor a plain file is refused.

A file is read whole once, and compared with its SHA-256. That it was sound is kept as an empty file in the
user's cache directory. Its name is a digest of what the system says of the file: device, inode, length, times
of its content and of its entry. Whoever writes into a file changes these, and it is read again. A disk that
loses bits silently does not: `stride index verify` reads everything.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
import time
from collections.abc import Iterable
from pathlib import Path

from index_format.errors import IndexDamaged

_REMEDY = (
    "an index holds plain files and directories only: remove it; where your own links are meant, "
    "copy the index with them followed (cp -rL) and use the copy"
)


def own_directory(path: Path) -> bool:
    """Make a directory, parents too; return True where it is this user's alone and can be written.

    Files loaded from it are trusted: nobody else may have put them there.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.lstat()
    except OSError:
        return False
    ours = not hasattr(os, "getuid") or found.st_uid == os.getuid()
    return stat.S_ISDIR(found.st_mode) and ours and os.access(path, os.W_OK)


def is_inside(name: str) -> bool:
    """Check that a name, with slashes, is one of a file below the directory that it is joined to."""
    try:
        parts = name.encode().split(b"/")
    except UnicodeEncodeError:
        return False
    return all(part not in (b"", b".", b"..") and b"\0" not in part and len(part) < 256 for part in parts)


def open_inside(root: Path, name: str, flags: int = os.O_RDONLY) -> int:
    """Open the plain file `name` below `root` and return its descriptor.

    Parameters
    ----------
    name : str      with slashes; the directories on the way must be there
    flags : of `os.open`; with O_CREAT the file is made where it is missing

    Raises
    ------
    FileNotFoundError      it, or a directory on the way, is not there
    IndexDamaged           it, or something on the way, is a link, a FIFO, a device; or the name leads outside
    """
    if not is_inside(name):
        raise IndexDamaged(f"{name!r} leads out of {root}", fix=_REMEDY)
    *way, last = name.split("/")
    handle, here = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), root
    try:
        for part in way:
            here = here / part
            below = _open(part, os.O_RDONLY | os.O_DIRECTORY, handle, here)
            os.close(handle)
            handle = below
        # a FIFO is not waited for, but seen to be one
        opened = _open(last, flags | os.O_NONBLOCK, handle, here / last)
    finally:
        os.close(handle)
    mode = os.fstat(opened).st_mode
    if stat.S_ISREG(mode):
        return opened
    os.close(opened)
    if stat.S_ISDIR(mode):
        raise FileNotFoundError(errno.EISDIR, os.strerror(errno.EISDIR), str(root / name))
    raise _strange(root / name, mode)


def look_inside(root: Path, name: str) -> os.stat_result:
    """Return the status of the plain file `name` below `root`; errors as of `open_inside`."""
    opened = open_inside(root, name)
    try:
        return os.fstat(opened)
    finally:
        os.close(opened)


def refuse_strange_files(root: Path) -> None:
    """Raise IndexDamaged where anything below `root` (or `root`) is neither a directory nor a plain file."""
    try:
        found = root.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISDIR(found.st_mode):
        raise _strange(root, found.st_mode)
    for directory, names, files, handle in os.fwalk(root, follow_symlinks=False):
        for name in (*names, *files):
            mode = os.stat(name, dir_fd=handle, follow_symlinks=False).st_mode
            if not stat.S_ISDIR(mode) and not stat.S_ISREG(mode):
                raise _strange(Path(directory, name), mode)


def _open(part: str, flags: int, directory: int, path: Path) -> int:
    """Open one part of a way, without following it; `path` is for messages."""
    try:
        return os.open(part, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666, dir_fd=directory)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENOTDIR, errno.ENXIO, errno.EISDIR):
            raise
        mode = os.stat(part, dir_fd=directory, follow_symlinks=False).st_mode
        if stat.S_ISREG(mode):  # a file on the way: there is nothing below it
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path)) from None
        raise _strange(path, mode) from None


def _strange(path: Path, mode: int) -> IndexDamaged:
    kinds = {
        stat.S_IFREG: "a plain file",
        stat.S_IFDIR: "a directory",
        stat.S_IFLNK: "a link",
        stat.S_IFIFO: "a FIFO",
        stat.S_IFSOCK: "a socket",
    }
    kind = kinds.get(stat.S_IFMT(mode), "a device")
    return IndexDamaged(f"{path} is {kind}, and is not touched", fix=_REMEDY)


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
