"""The chunk files of one array: ShardWriter appends, map_array maps, ShardedArray reads several as one."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from index_format.confined import look_inside, open_inside
from index_format.durable import make_directory, storage, write_all
from index_format.errors import RESTORE, IndexDamaged
from index_format.manifest import ArrayMetadata, chunk_name

Check = Callable[[str, os.stat_result, memoryview], None]
_BLOCK_VALUES = 1 << 20
_BUFFER_BYTES = 1 << 17
_ZEROS = bytes(1 << 20)


def ranges(stop: int, start: int = 0, *, width: int = 1) -> Iterator[tuple[int, int]]:
    """Split rows start … stop-1, of `width` values each, into blocks (first, last + 1) of bounded size."""
    rows = max(1, _BLOCK_VALUES // max(1, width))
    for first in range(start, stop, rows):
        yield first, min(first + rows, stop)


class ShardedArray:
    """An array that lies in several files, split along axis 0; read-only.

    Stages read it by ``len``, ``shape``, ``dtype``, ``np.asarray``, rows, slices of rows, arrays of row
    numbers and boolean masks. A read within one file returns a view of it, else a copy.
    """

    def __init__(self, shards: Sequence[Any]) -> None:
        self._pieces: list[Any] = list(shards)
        self._starts = np.cumsum([0, *(len(shard) for shard in shards)])
        self.shape: tuple[int, ...] = (int(self._starts[-1]), *shards[0].shape[1:])
        self.dtype = shards[0].dtype

    @property
    def shards(self) -> list[np.ndarray]:
        """The pieces, in order, mapped."""
        return [np.asarray(piece) for piece in self._pieces]

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return int(np.prod(self.shape))

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[Any]:
        for shard in self._pieces:
            yield from np.asarray(shard)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError("an array in several files cannot be had without a copy")
        whole = np.concatenate(self._pieces)
        return whole if dtype is None else whole.astype(dtype, copy=False)

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, tuple):
            if not key:
                return np.asarray(self)
            # the first key picks rows; the others apply to what it leaves
            rows = self[key[0]]
            return rows[key[1:] if isinstance(key[0], int | np.integer) else (slice(None), *key[1:])]
        if key is Ellipsis:
            return np.asarray(self)
        if isinstance(key, int | np.integer):
            row = int(key) + (len(self) if key < 0 else 0)
            if not 0 <= row < len(self):
                raise IndexError(f"row {key} of an array of {len(self)} rows")
            shard = int(np.searchsorted(self._starts, row, side="right")) - 1
            return self._pieces[shard][row - self._starts[shard]]
        if not isinstance(key, slice):
            return self._gather(np.asarray(key))
        start, stop, step = key.indices(len(self))
        if step != 1:
            return self._gather(np.arange(start, stop, step))
        pieces = [
            shard[max(start - low, 0) : stop - low]
            for shard, low in zip(self._pieces, self._starts[:-1].tolist(), strict=True)
            if start < low + len(shard) and stop > low
        ]
        if not pieces:
            return np.empty((0, *self.shape[1:]), self.dtype)
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def _gather(self, rows: np.ndarray) -> np.ndarray:
        if rows.dtype == bool:
            if rows.shape != (len(self),):
                raise IndexError(f"a mask of shape {rows.shape} for an array of {len(self)} rows")
            rows = np.flatnonzero(rows)
        if rows.size == 0:
            return np.empty((*rows.shape, *self.shape[1:]), self.dtype)
        if rows.dtype.kind not in "iu":
            raise IndexError(f"rows are chosen by integers or booleans, found {rows.dtype}")
        wanted = rows.astype(np.int64).ravel()
        wanted = np.where(wanted < 0, wanted + len(self), wanted)
        if wanted.min() < 0 or wanted.max() >= len(self):
            raise IndexError(f"a row outside an array of {len(self)} rows")
        found = np.empty((len(wanted), *self.shape[1:]), self.dtype)
        owner = np.searchsorted(self._starts, wanted, side="right") - 1
        for shard in np.unique(owner):
            here = owner == shard
            found[here] = self._pieces[shard][wanted[here] - self._starts[shard]]
        return found.reshape(*rows.shape, *self.shape[1:])


class _Chunk:
    """A mapped chunk file, compared with its manifest when something of it is first read."""

    def __init__(self, rows: np.ndarray, check: Callable[[], None] | None) -> None:
        self._rows = rows
        self._check = check
        self.shape = rows.shape
        self.dtype = rows.dtype

    def checked(self) -> np.ndarray:
        """Return all rows; IndexDamaged where the file is not what was written."""
        if self._check is not None:
            self._check()
            self._check = None
        return self._rows

    def __len__(self) -> int:
        return self.shape[0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.checked(), dtype=dtype, copy=copy)

    def __getitem__(self, key: Any) -> Any:
        return self.checked()[key]


def map_array(
    root: Path, name: str, metadata: ArrayMetadata, check: Check | None = None
) -> np.ndarray | ShardedArray:
    """Memory-map, read-only, the array whose chunk files lie below `root`/`name`.

    Parameters
    ----------
    check : called with the name of a chunk file below `root`, its status when it was mapped, and all of it,
        before any row is handed out; raises where it is not what was written

    Returns
    -------
    np.memmap where one file holds it, ShardedArray where several do, a plain array where it has no rows

    Raises
    ------
    IndexDamaged      a chunk file is missing, too short, or no plain file
    """
    dtype = np.dtype(metadata.dtype).newbyteorder("<")
    chunks = []
    for file in range(metadata.n_files):
        first, last = metadata.file_rows(file)
        n_bytes = (last - first) * metadata.row_bytes
        chunk = f"{name}/{chunk_name(file, len(metadata.shape))}"
        opened, whole = _map_file(root, chunk, n_bytes)
        rows = whole[:n_bytes].view(dtype).reshape(last - first, *metadata.shape[1:])
        chunks.append(_Chunk(rows, None if check is None else partial(check, chunk, opened, whole.data)))
    if not chunks:
        empty = np.empty(metadata.shape, dtype)
        empty.flags.writeable = False
        return empty
    return chunks[0].checked() if len(chunks) == 1 else ShardedArray(chunks)


def _map_file(root: Path, name: str, n_bytes: int) -> tuple[os.stat_result, np.ndarray]:
    """Map a file of at least `n_bytes` as uint8, and return its status."""
    path = root / name
    try:
        with os.fdopen(open_inside(root, name), "rb") as file:
            opened = os.fstat(file.fileno())
            if opened.st_size >= n_bytes:
                return opened, np.memmap(file, np.uint8, "r")
    except FileNotFoundError:
        raise IndexDamaged(f"{path} is missing", fix=RESTORE) from None
    raise IndexDamaged(f"{path} should have {n_bytes:,} bytes, has {opened.st_size:,}", fix=RESTORE)


class ShardWriter:
    """Appends rows to the chunk files of one array, digesting them as they pass.

    Parameters
    ----------
    directory : Path           of the array
    dtype : str                NumPy name
    tail : tuple of int        the sizes of a row
    shard_bytes : int          largest chunk file
    length : int               rows already there; `take_up` comes next where there are any
    digests : dict             file number -> SHA-256; kept of those that are full

    Attributes
    ----------
    unsaved : set              numbers of full files whose digests no journal has yet
    has_new_files : bool       directory entries have to be synced
    """

    def __init__(
        self,
        directory: Path,
        dtype: str,
        tail: tuple[int, ...],
        *,
        shard_bytes: int,
        length: int = 0,
        digests: dict[int, str] | None = None,
    ) -> None:
        self.directory = directory
        self.dtype = np.dtype(dtype)
        self.tail = tail
        self.length = length
        self.unsaved: set[int] = set()
        self.has_new_files = False
        row_bytes = self.dtype.itemsize * int(np.prod(tail, dtype=np.int64))
        self._rows = max(1, shard_bytes // row_bytes)  # of a file; one where a row alone is larger
        self._file_bytes = self._rows * row_bytes
        self._file = length // self._rows  # the file that the next row goes to
        self._used = length % self._rows * row_bytes  # bytes in it, buffered ones included
        self.digests = {file: sha256 for file, sha256 in (digests or {}).items() if file < self._file}
        self._digest = hashlib.sha256()  # of the current file so far
        self._buffer = bytearray()
        self._fd = -1
        self._dirty = False

    @property
    def metadata(self) -> ArrayMetadata:
        """Shape, dtype and chunking as they are now; while one file holds the array, it is one chunk."""
        return ArrayMetadata(
            (self.length, *self.tail), self.dtype.name, min(self._rows, self.length) if self.length else 1
        )

    @property
    def open_digest(self) -> str | None:
        """SHA-256 of the current file's content; None where it is empty."""
        return self._digest.hexdigest() if self._used else None

    def file_bytes(self) -> Iterator[tuple[Path, int]]:
        """Yield (path, bytes) of every chunk file, as the rows so far need them."""
        n_full, rest = divmod(self.length, self._rows)
        for file in range(n_full):
            yield self._path(file), self._file_bytes
        if rest:
            yield self._path(n_full), self._used

    def take_up(self, sha256: str | None = None) -> None:
        """Go on in files that an earlier process left; the last one is cut to the rows so far.

        Parameters
        ----------
        sha256 : of what the last file then holds, where that is known

        Raises
        ------
        IndexDamaged      a file is missing or too short, or the last one holds something else
        """
        for file, (path, size) in enumerate(self.file_bytes()):
            try:
                actual = look_inside(self.directory, self._name(file)).st_size
            except FileNotFoundError:
                actual = -1
            if actual < size or (file < self._file and file not in self.digests):
                found = f"has {actual:,}" if actual >= 0 else "is missing"
                raise IndexDamaged(
                    f"unfinished build lost data: {path} should have {size:,} bytes and a digest, {found}",
                    fix="rerun the command with --overwrite: it begins anew",
                )
        if self._used:
            begun = open_inside(self.directory, self._name(self._file), os.O_RDWR)
            with os.fdopen(begun, "rb+") as opened:
                opened.truncate(self._used)
                self._digest = hashlib.file_digest(opened, "sha256")
        if sha256 is not None and self.open_digest != sha256:
            raise IndexDamaged(
                f"{self._path(self._file)} has other content than an unfinished build has left there",
                fix="rerun the command with --overwrite: it begins anew",
            )

    def append(self, values: np.ndarray) -> None:
        """Append rows (their dtype and row shape are the caller's to check)."""
        if len(values) == 0:
            return
        little = np.ascontiguousarray(values, self.dtype.newbyteorder("<"))
        data = little.reshape(-1).view(np.uint8).data
        while len(data):
            piece = data[: self._file_bytes - self._used]
            if self._buffer or len(piece) < _BUFFER_BYTES:
                self._buffer += piece
                if len(self._buffer) >= _BUFFER_BYTES:
                    self.flush()
            else:
                self._write(piece)  # large pieces need no copy
            self._used += len(piece)
            data = data[len(piece) :]
            if self._used == self._file_bytes:
                self._seal()
        self.length += len(values)

    def flush(self) -> None:
        """Hand what is buffered to the operating system."""
        if self._buffer:
            self._write(self._buffer)
            self._buffer = bytearray()

    def sync(self) -> None:
        """Sync everything appended; directory entries are the caller's."""
        self.flush()
        if self._dirty:
            with storage(self._path(self._file), self._used):
                os.fsync(self._fd)
            self._dirty = False

    def view(self) -> np.ndarray | ShardedArray:
        """Map the rows appended so far."""
        self.flush()
        return map_array(self.directory.parent, self.directory.name, self.metadata)

    def finish(self) -> list[tuple[Path, int, str]]:
        """Complete the last file, sync, and return (path, length, SHA-256) of every chunk file.

        Zarr wants all chunks of an array to be of one size: where there are several, the last is filled up
        with zeros. Nothing may be appended afterwards.
        """
        self.flush()
        n_files = self.metadata.n_files
        if self._used:
            missing = self._file_bytes - self._used if n_files > 1 else 0
            if missing:
                self._open()
                with storage(self._path(self._file), missing):
                    os.ftruncate(self._fd, self._file_bytes)  # a hole: takes no space
                self._dirty = True
                for _ in range(missing // len(_ZEROS)):
                    self._digest.update(_ZEROS)
                self._digest.update(_ZEROS[: missing % len(_ZEROS)])
            self.sync()
            self.digests[self._file] = self._digest.hexdigest()
        self.close()
        paths = [self._path(file) for file in range(n_files)]
        return [(path, path.stat().st_size, self.digests[file]) for file, path in enumerate(paths)]

    def close(self) -> None:
        """Close the file; what is still buffered is dropped, as it is not committed."""
        self._buffer = bytearray()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _name(self, file: int) -> str:
        return chunk_name(file, 1 + len(self.tail))

    def _path(self, file: int) -> Path:
        return self.directory / self._name(file)

    def _open(self) -> None:
        if self._fd < 0:
            path = self._path(self._file)
            new = not path.exists()
            make_directory(path.parent)
            with storage(path, self._file_bytes if new else 0):
                self._fd = open_inside(self.directory, self._name(self._file), os.O_RDWR | os.O_CREAT)
            os.lseek(self._fd, 0, os.SEEK_END)
            self.has_new_files |= new

    def _write(self, data: bytes | bytearray | memoryview) -> None:
        self._open()
        write_all(self._fd, data, self._path(self._file))
        self._dirty = True
        self._digest.update(data)

    def _seal(self) -> None:
        """Sync the current file, which is full, keep its digest, go on to the next."""
        self.sync()
        self.digests[self._file] = self._digest.hexdigest()
        self.unsaved.add(self._file)
        self.close()
        self._file += 1
        self._used = 0
        self._digest = hashlib.sha256()
