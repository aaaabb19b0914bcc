"""Files below one directory, and nothing outside it: no link is followed, nothing but plain files is opened.

An index may come from anybody. A link in it could make a build write over its owner's files and a reader read
them; a FIFO or a device would never end. So what lies below an index is opened one directory after the other,
each relative to the one before, and whatever is neither a directory nor a plain file is refused.
"""

from __future__ import annotations

import errno
import os
import stat
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
