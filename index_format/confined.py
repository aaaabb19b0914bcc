"""Files below one directory, and nothing outside it: no link is followed, nothing but files is opened.

An index may come from anybody. A link in it could make a build write over its owner's files and a reader read
them; a FIFO or a device would never end. So what lies below an index is opened one directory after the other,
each relative to the one before, and whatever is neither a directory nor a plain file is refused.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from index_format.errors import RESTORE, IndexDamaged

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_REMEDY = (
    "an index holds plain files and directories only: remove it; where your own links are meant, "
    "copy the index with them followed (cp -rL) and use the copy"
)


def own_directory(path: Path) -> bool:
    """Make a directory of this user's alone, parents too; whether it is one now that can be written.

    What is loaded from it is trusted: nobody else may have put it there.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.lstat()
    except OSError:
        return False
    ours = not hasattr(os, "getuid") or found.st_uid == os.getuid()
    return stat.S_ISDIR(found.st_mode) and ours and os.access(path, os.W_OK)


def is_inside(name: str) -> bool:
    """Whether a name, with slashes, stays below the directory that it is joined to."""
    return "\0" not in name and all(part not in ("", ".", "..") for part in name.split("/"))


def open_inside(root: Path, name: str, flags: int = os.O_RDONLY) -> int:
    """A descriptor of the plain file `name` below `root`.

    Parameters
    ----------
    name : str      with slashes; the directories on the way must be there
    flags : of `os.open`; with O_CREAT the file is made where it is missing

    Raises
    ------
    FileNotFoundError      it, or a directory on the way, is not there
    IndexDamaged           it, or something on the way, is a link, a FIFO, a device; or the name leads outside
    """
    with _parent(root, name) as (directory, last):
        try:
            found = os.stat(last, dir_fd=directory, follow_symlinks=False)
        except FileNotFoundError:
            if not flags & os.O_CREAT:
                raise
        else:
            if flags & os.O_CREAT and stat.S_ISDIR(found.st_mode):
                raise _strange(root / name, "a directory")
            _refuse(root / name, found)
        try:
            opened = os.open(last, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666, dir_fd=directory)
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            raise _strange(root / name, "a link") from None
    if not stat.S_ISREG(os.fstat(opened).st_mode):
        os.close(opened)
        raise _strange(root / name, "no plain file")
    return opened


def look_inside(root: Path, name: str) -> os.stat_result:
    """The status of the plain file `name` below `root`; errors as of `open_inside`."""
    with _parent(root, name) as (directory, last):
        found = os.stat(last, dir_fd=directory, follow_symlinks=False)
    _refuse(root / name, found)
    return found


def read_inside(root: Path, name: str, *, limit: int) -> bytes:
    """A whole file below `root`; IndexDamaged also where it is longer than `limit` bytes."""
    with os.fdopen(open_inside(root, name), "rb") as file:
        length = os.fstat(file.fileno()).st_size
        if length > limit:
            raise IndexDamaged(
                f"{root / name} has {length:,} bytes, more than the {limit:,} of any that stride writes",
                fix=RESTORE,
            )
        return file.read()


def refuse_strange_files(root: Path) -> None:
    """IndexDamaged where anything below `root` (or `root`) is neither a directory nor a plain file."""
    try:
        found = root.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISDIR(found.st_mode):
        raise _strange(root, _kind(found))
    for directory, names, files, handle in os.fwalk(root, follow_symlinks=False):
        for name in (*names, *files):
            found = os.stat(name, dir_fd=handle, follow_symlinks=False)
            if not stat.S_ISDIR(found.st_mode):
                _refuse(Path(directory, name), found)


@contextmanager
def _parent(root: Path, name: str) -> Iterator[tuple[int, str]]:
    """A handle of the directory that `name` is in, and its last part."""
    if not is_inside(name):
        raise IndexDamaged(f"{str(name)!r} leads out of {root}", fix=_REMEDY)
    *way, last = name.split("/")
    handle = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for depth, part in enumerate(way):
            try:
                below = os.open(part, _DIRECTORY, dir_fd=handle)
            except OSError as error:
                if error.errno not in (errno.ELOOP, errno.ENOTDIR):
                    raise
                here = root.joinpath(*way[: depth + 1])
                found = os.stat(part, dir_fd=handle, follow_symlinks=False)
                if stat.S_ISREG(found.st_mode):  # then there is nothing below it
                    raise _missing(root / name, errno.ENOENT) from None
                raise _strange(here, _kind(found)) from None
            os.close(handle)
            handle = below
        yield handle, last
    finally:
        os.close(handle)


def _refuse(path: Path, found: os.stat_result) -> None:
    if stat.S_ISDIR(found.st_mode):
        raise _missing(path, errno.EISDIR)
    if not stat.S_ISREG(found.st_mode):
        raise _strange(path, _kind(found))


def _missing(path: Path, number: int) -> FileNotFoundError:
    return FileNotFoundError(number, os.strerror(number), str(path))


def _kind(found: os.stat_result) -> str:
    kinds = {
        stat.S_IFLNK: "a link",
        stat.S_IFIFO: "a FIFO",
        stat.S_IFSOCK: "a socket",
        stat.S_IFCHR: "a device",
        stat.S_IFBLK: "a device",
    }
    return kinds.get(stat.S_IFMT(found.st_mode), "no plain file")


def _strange(path: Path, kind: str) -> IndexDamaged:
    return IndexDamaged(f"{path} is {kind}, and is not touched", fix=_REMEDY)
