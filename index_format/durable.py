"""Durable files: fsync, atomic replacement, locks, journals, and a full disk reported as such."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import json
import os
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from index_format.confined import open_inside
from index_format.errors import IndexBusy, IndexExists, StorageFull

_RENAME_NOREPLACE = 1
_RENAME_EXCHANGE = 2
_AT_FDCWD = -100
# the kernel or the filesystem does not know the flag
_UNSUPPORTED = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP)
_COPY_BYTES = 1 << 20
# written at once: of more, recent kernels look for large pages in their cache, which takes ten times as long
# as the writing where memory is fragmented
PIECE_BYTES = 1 << 20


@contextlib.contextmanager
def storage(path: Path, n_bytes: int) -> Iterator[None]:
    """Turn "no space" and "over quota" into StorageFull, which names `path` and the bytes being written."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT) or isinstance(error, StorageFull):
            raise
        full = StorageFull(
            f"no space left while writing {n_bytes:,} bytes to {path} ({_free_bytes(path):,} bytes free)",
            fix="free some space and rerun the same command; it resumes from the last commit",
        )
        full.errno = error.errno
        raise full from error


def _free_bytes(path: Path) -> int:
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def require_space(directory: Path, n_bytes: int, *, what: str) -> None:
    """Raise StorageFull where the disk of a directory has less than so many bytes free.

    Parameters
    ----------
    what : str      that needs them, for people: "merging into c.stride"
    """
    free = _free_bytes(directory)
    if free < n_bytes:
        raise StorageFull(
            f"{what} needs about {n_bytes:,} bytes, and the disk of {directory} has {free:,} free",
            fix="free some space, or choose a place on another disk",
        )


def write_all(fd: int, data: bytes | bytearray | memoryview, path: Path) -> None:
    """Write all of `data` to `fd` at its position; StorageFull when the disk is full."""
    view = memoryview(data).cast("B")
    with storage(path, len(view)):
        while len(view):
            view = view[os.write(fd, view[:PIECE_BYTES]) :]


def write_file(path: Path, data: bytes) -> None:
    """Create or replace the file `path`, on disk when this returns (its directory entry is not)."""
    with storage(path, len(data)):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o666)
        try:
            write_all(fd, data, path)
            os.fsync(fd)
        finally:
            os.close(fd)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield PATH.new, which takes the place of `path`, durably, once the block is done.

    Nothing is there at first, so that it can be opened as a new file; after an error it is removed.
    """
    fresh = path.with_name(path.name + ".new")
    with storage(path, 0):
        fresh.unlink(missing_ok=True)
    try:
        yield fresh
        with storage(path, 0), fresh.open("rb") as written:
            os.fsync(written.fileno())
    except BaseException:
        with contextlib.suppress(OSError):
            fresh.unlink(missing_ok=True)
        raise
    fresh.replace(path)
    sync_directory(path.parent)


def replace_file(path: Path, data: bytes) -> None:
    """Create or replace the file `path` in one step: whatever happens, the old or the new one is whole."""
    with replacing(path) as fresh:
        write_file(fresh, data)


def make_directory(path: Path) -> None:
    """Create `path` and its parents where missing."""
    with storage(path, 0):
        path.mkdir(parents=True, exist_ok=True)


def sync_directory(path: Path) -> None:
    """Make the entries of directory `path` durable."""
    with storage(path, 0):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        except OSError as error:
            if error.errno != errno.EINVAL:  # some network filesystems cannot, and need not
                raise
        finally:
            os.close(fd)


def sync_tree(path: Path) -> None:
    """Make the entries of `path` and of all directories below it durable."""
    for directory, _, _ in os.walk(path):
        sync_directory(Path(directory))


def sync_files(path: Path) -> None:
    """Make the content of all files below `path` durable, which other programs may have written."""
    for directory, _, names in os.walk(path):
        for name in names:
            file = Path(directory) / name
            with storage(file, 0), file.open("rb") as opened:
                os.fsync(opened.fileno())


def sha256_file(path: Path) -> tuple[int, str]:
    """Return (length, SHA-256 in hexadecimal) of a file, read in pieces."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return file.tell(), digest


def link_or_copy(source: Path, target: Path) -> None:
    """Give `source` a second name; copy it where the filesystem has no hard links."""
    make_directory(target.parent)
    try:
        target.hardlink_to(source)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            with storage(target, 0):
                raise
        copy_file(source, target)


def copy_file(source: Path, target: Path) -> str:
    """Copy a file, durably; returns the SHA-256 of what was read."""
    make_directory(target.parent)
    digest = hashlib.sha256()
    with storage(target, source.stat().st_size), source.open("rb") as read, target.open("wb", 0) as write:
        while piece := read.read(_COPY_BYTES):
            digest.update(piece)
            write_all(write.fileno(), piece, target)
        os.fsync(write.fileno())
    return digest.hexdigest()


def link_tree(source: Path, target: Path, *, skip: tuple[str, ...] = ()) -> None:
    """Link or copy every file below `source`, except those whose name is in `skip`."""
    for directory, _, names in os.walk(source):
        here = target / Path(directory).relative_to(source)
        make_directory(here)
        for name in names:
            if name not in skip:
                link_or_copy(Path(directory) / name, here / name)


def rename_new(source: Path, target: Path) -> None:
    """Rename, in one step, to a name that is free; IndexExists when it is not."""
    failure = _renameat2(source, target, _RENAME_NOREPLACE)
    unsupported = failure in _UNSUPPORTED
    if failure == errno.EEXIST or (unsupported and os.path.lexists(target)):
        raise IndexExists(f"{target} has appeared while its build was running", fix="move it away and rerun")
    if unsupported:
        source.rename(target)  # replaces an empty directory only, and never one with something in it
    elif failure:
        raise OSError(failure, os.strerror(failure), str(source), None, str(target))


def exchange(source: Path, target: Path, aside: Path) -> None:
    """Put `source` in the place of `target`, in one step where the filesystem can.

    Afterwards what was at `target` is at `source`, or at `aside` where it had to be done in two renames (a
    reader between the two finds nothing at `target`; `aside` tells the next build to put it back).
    """
    failure = _renameat2(source, target, _RENAME_EXCHANGE)
    if failure in _UNSUPPORTED:
        target.rename(aside)
        source.rename(target)
    elif failure:
        raise OSError(failure, os.strerror(failure), str(source), None, str(target))


def put_in_place(made: Path, target: Path, partial: Path, *, replace: bool = True) -> None:
    """Rename `made`, which lies in the directory `partial`, to `target`, durably.

    What is there goes to where `made` was or to PARTIAL/replaced; with `replace` False, IndexExists.
    """
    if replace and os.path.lexists(target):
        exchange(made, target, partial / "replaced")
    else:
        rename_new(made, target)
    sync_directory(target.parent)


def _renameat2(source: Path, target: Path, flags: int) -> int:
    """Call renameat2(2) and return its errno, 0 when it worked."""
    try:
        call = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:  # an older C library, or not Linux
        return errno.ENOSYS
    if call(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), flags) == 0:
        return 0
    return ctypes.get_errno()


class DirectoryLock:
    """An exclusive lock on a directory, held by the file ``lock`` in it; gone when its process is.

    Raises
    ------
    IndexBusy      another live process holds it
    """

    NAME = "lock"

    def __init__(self, directory: Path) -> None:
        self._path = directory / self.NAME
        self._fd = -1
        while self._fd < 0:
            self._try()

    def _try(self) -> None:
        make_directory(self._path.parent)
        with storage(self._path, 0):
            try:
                fd = open_inside(self._path.parent, self._path.name, os.O_RDWR | os.O_CREAT)
            except FileNotFoundError:  # the holder has just published and removed the directory
                return
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(fd, 32, 0).decode("ascii", "replace").strip()
            os.close(fd)
            raise IndexBusy(
                f"another process{f' ({holder})' if holder else ''} is building in {self._path.parent}",
                fix="wait until it has finished, or stop it",
            ) from None
        # the file may have been unlinked, by the holder, between our open and our lock
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(fd), self._path.stat()):
                self._fd = fd
                with contextlib.suppress(OSError):  # the number is a courtesy; a full disk must not stop us
                    os.ftruncate(fd, 0)
                    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
                return
        os.close(fd)

    @property
    def held(self) -> bool:
        return self._fd >= 0

    def remove(self) -> None:
        """Delete the lock file and let go; the last act of a build."""
        self._path.unlink(missing_ok=True)
        self.release()

    def release(self) -> None:
        """Let go, leaving the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class Journal:
    """An append-only file of JSON objects, one a line: ``<CRC-32 of the JSON, 8 hex digits> <JSON>``.

    Opening reads the entries up to the first line that is incomplete or fails its checksum, and cuts off what
    follows, so that the next entry starts on a line of its own.
    """

    NAME = "journal.jsonl"

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries: list[dict[str, Any]] = []
        with storage(path, 0):
            self._fd = open_inside(path.parent, path.name, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        valid = 0
        with os.fdopen(os.dup(self._fd), "rb") as file:
            for line in file:
                entry = self._decode(line)
                if entry is None:
                    break
                self.entries.append(entry)
                valid += len(line)
        os.ftruncate(self._fd, valid)

    def write(self, entry: dict[str, Any]) -> None:
        """Append one entry; it is on disk when this returns."""
        body = json.dumps(entry, sort_keys=True, separators=(",", ":")).encode()
        write_all(self._fd, b"%08x %s\n" % (zlib.crc32(body), body), self.path)
        with storage(self.path, len(body)):
            os.fsync(self._fd)
        self.entries.append(json.loads(body))

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    @staticmethod
    def _decode(line: bytes) -> dict[str, Any] | None:
        body = line[9:-1]
        if not line.endswith(b"\n") or line[:9] != b"%08x " % zlib.crc32(body):
            return None
        try:
            entry = json.loads(body)
        except (ValueError, RecursionError):
            return None
        return entry if isinstance(entry, dict) else None
