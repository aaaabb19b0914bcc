"""What an index is read from: a directory, whose files are mapped, or a zarr store, read as far as needed."""

from __future__ import annotations

import hashlib
import os
import re
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Coroutine, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from index_format.confined import look_inside, open_inside, read_inside
from index_format.errors import RESTORE, ExtraMissing, IndexDamaged, IndexUnreachable
from index_format.location import Location, RemotePath, locate, without_password
from index_format.metadata import ZARR_JSON, ArrayMetadata, chunk_name
from index_format.shards import ShardedArray, map_array
from index_format.soundness import Soundness

if TYPE_CHECKING:
    from zarr.abc.store import Store

_T = TypeVar("_T")
Files = Mapping[str, tuple[int, str]]  # path below the index -> (length, SHA-256), as manifests say
_READ_BYTES = 1 << 20
_DOCUMENT_BYTES = 1 << 28  # of a manifest or a zarr.json, a line of which names a file of up to 256 MiB
# of a store: what is smaller is fetched whole, once; what is larger by the rows asked for, or in pieces
_SMALL_BYTES = 4 << 20
_PIECE_BYTES = 16 << 20
_AT_ONCE = 4  # requests under way: more new connections at once, and a small server drops some for a second
_FEW_ROWS = 32  # scattered ones, each asked for by itself
_CONNECT_SECONDS, _SILENT_SECONDS = 20, 60  # of an HTTP server


class Place(ABC):
    """Where the files of an index lie; names are paths below it, with slashes.

    Attributes
    ----------
    path : Path or RemotePath      for messages, and for other processes
    """

    path: Location

    @abstractmethod
    def read(self, name: str) -> bytes:
        """A whole file; FileNotFoundError where there is none."""

    def read_all(self, names: Iterable[str]) -> dict[str, bytes]:
        """Several small files; those that are missing are left out."""
        found = {}
        for name in names:
            try:
                found[name] = self.read(name)
            except FileNotFoundError:
                continue
        return found

    @abstractmethod
    def exists(self, name: str) -> bool:
        """Whether there is such a file."""

    @abstractmethod
    def has_group(self, group: str) -> bool:
        """Whether a stage has been run, as far as can be told without reading what it left."""

    @abstractmethod
    def check_length(self, name: str, length: int) -> None:
        """IndexDamaged where a file is missing or has another length, if a look without reading tells."""

    @abstractmethod
    def array(self, name: str, metadata: ArrayMetadata, files: Files) -> np.ndarray | ShardedArray:
        """An array, read-only; `files` are those of its group's manifest, by their paths below the index."""

    @abstractmethod
    def pieces(self, name: str, length: int) -> Iterator[bytes]:
        """The content of a file, a piece at a time; FileNotFoundError where there is none."""

    @abstractmethod
    def names(self) -> list[str] | None:
        """All files below, and directories, with a slash at their end; None where that cannot be asked."""


class Directory(Place):
    """An index on a local disk.

    Parameters
    ----------
    path : Path      absolute
    """

    def __init__(self, path: Path) -> None:
        self.path: Path = path
        self._soundness = Soundness(path)

    def read(self, name: str) -> bytes:
        try:
            return read_inside(self.path, name, limit=_DOCUMENT_BYTES)
        except NotADirectoryError as error:  # the index itself
            raise FileNotFoundError(*error.args) from None

    def exists(self, name: str) -> bool:
        try:
            look_inside(self.path, name)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def has_group(self, group: str) -> bool:
        return (self.path / group).is_dir()

    def check_length(self, name: str, length: int) -> None:
        try:
            found = look_inside(self.path, name).st_size
        except FileNotFoundError:
            raise IndexDamaged(f"{self.path / name} is missing", fix=RESTORE) from None
        if found != length:
            raise IndexDamaged(f"{self.path / name} should have {length:,} bytes, has {found:,}", fix=RESTORE)

    def array(self, name: str, metadata: ArrayMetadata, files: Files) -> np.ndarray | ShardedArray:
        def check(chunk: str, opened: os.stat_result, content: memoryview) -> None:
            self._soundness.check(chunk, opened, content, files[chunk][1])

        return map_array(self.path, name, metadata, check)

    def pieces(self, name: str, length: int) -> Iterator[bytes]:
        with os.fdopen(open_inside(self.path, name), "rb") as file:
            # one that grows while it is read is not read for ever
            while length >= 0 and (piece := file.read(_READ_BYTES)):
                length -= len(piece)
                yield piece

    def names(self) -> list[str]:
        found = []
        for here, directories, files in os.walk(self.path):
            relative = Path(here).relative_to(self.path)
            found += [f"{(relative / name).as_posix()}/" for name in directories]
            found += [(relative / name).as_posix() for name in files]
        return found


class Stored(Place):
    """An index in any zarr store: nothing of it is written, and what has been read whole is kept.

    Nothing is asked of a file before it is needed, not even its length: whole files are compared with their
    SHA-256, parts of files with the length that was asked for.

    Parameters
    ----------
    store : zarr.abc.store.Store      open
    path : Path or RemotePath         of the store, for messages
    prefix : str                      where in the store the index is: "", or with a slash at its end
    """

    def __init__(self, store: Store, path: Location, prefix: str = "", *, lists: bool = True) -> None:
        self.path = path
        self._store = store
        self._prefix = prefix
        self._lists = lists and store.supports_listing
        self._arrays: dict[str, np.ndarray | ShardedArray] = {}
        self._groups: dict[str, bool] = {}

    def read(self, name: str) -> bytes:
        found = self.fetch([(name, None)])[0]
        if found is None:
            raise FileNotFoundError(str(self.path / name))
        return found

    def read_all(self, names: Iterable[str]) -> dict[str, bytes]:
        wanted = list(names)
        found = self.fetch([(name, None) for name in wanted])
        return {name: data for name, data in zip(wanted, found, strict=True) if data is not None}

    def exists(self, name: str) -> bool:
        return self.fetch([(name, None)])[0] is not None

    def has_group(self, group: str) -> bool:
        if group not in self._groups:
            try:
                self._groups[group] = self.exists(f"{group}/{ZARR_JSON}")
            except IndexUnreachable as error:
                # where nobody may list, S3 and some web servers forbid what is not there
                if not is_forbidden(error.__cause__):
                    raise
                self._groups[group] = False
        return self._groups[group]

    def check_length(self, name: str, length: int) -> None:
        """Nothing: it is found when the file is read."""

    def array(self, name: str, metadata: ArrayMetadata, files: Files) -> np.ndarray | ShardedArray:
        if name not in self._arrays:
            chunks = [StoredChunk(self, name, metadata, file, files) for file in range(metadata.n_files)]
            if not chunks:
                self._arrays[name] = _read_only(np.empty(metadata.shape, metadata.dtype))
            elif sum(chunk.n_bytes for chunk in chunks) <= _SMALL_BYTES:
                pieces = read_whole(self, chunks)
                self._arrays[name] = pieces[0] if len(pieces) == 1 else _read_only(np.concatenate(pieces))
            else:
                self._arrays[name] = StoredArray(self, chunks)
        return self._arrays[name]

    def pieces(self, name: str, length: int) -> Iterator[bytes]:
        for start in range(0, length, _PIECE_BYTES) or (0,):
            stop = min(start + _PIECE_BYTES, length)
            found = self.fetch([(name, (start, stop) if length > _PIECE_BYTES else None)])[0]
            if found is None:
                raise FileNotFoundError(str(self.path / name))
            yield found
            # a server that knows no ranges has sent the whole file; a damaged one is shorter
            if len(found) != stop - start:
                return

    def names(self) -> list[str] | None:
        if not self._lists:
            return None

        async def listed() -> list[str]:
            return [name async for name in self._store.list_prefix(self._prefix)]

        found = _wait(self._told("", listed()))
        inside = {name.removeprefix(self._prefix) for name in found} - {""}
        above = {f"{parent}/" for name in inside for parent in Path(name).parents} - {"./"}
        return sorted(inside | above)

    def fetch(self, wanted: Sequence[tuple[str, tuple[int, int] | None]]) -> list[bytes | None]:
        """Files (None), or bytes start … stop-1 of files, several at once; None for what is missing.

        A server that knows no ranges sends the whole file instead.

        Raises
        ------
        IndexUnreachable      the store does not answer, or refuses
        IndexDamaged          a zip file's own checksum fails
        """

        import asyncio

        async def all_of_them() -> list[bytes | None]:
            gate = asyncio.Semaphore(_AT_ONCE)

            async def one(name: str, span: tuple[int, int] | None) -> bytes | None:
                async with gate:
                    return await self._told(name, self._get(name, span))

            return await asyncio.gather(*(one(name, span) for name, span in wanted))

        return _wait(all_of_them())

    async def _get(self, name: str, span: tuple[int, int] | None) -> bytes | None:
        from zarr.abc.store import RangeByteRequest
        from zarr.core.buffer import default_buffer_prototype

        asked = None if span is None else RangeByteRequest(*span)
        try:
            found = await self._store.get(self._prefix + name, default_buffer_prototype(), asked)
        except FileNotFoundError:
            return None
        return None if found is None else found.to_bytes()

    async def _told(self, name: str, answer: Awaitable[Any]) -> Any:
        """The answer; what a store raises, as an error that names the URL."""
        where = self.path / name
        try:
            return await answer
        except (zipfile.BadZipFile, zlib.error) as error:
            raise IndexDamaged(f"{where} is damaged: {error}", fix=RESTORE) from error
        except ImportError as error:  # of a protocol that is only looked for when it is used
            raise _extra_missing(where, error) from error
        except Exception as error:  # every kind of store has errors of its own
            raise _unreachable(where, error) from error


class StoredChunk:
    """A chunk file in a store: rows are fetched as they are asked for, or all of them, which are kept."""

    def __init__(self, place: Stored, array: str, metadata: ArrayMetadata, file: int, files: Files) -> None:
        first, last = metadata.file_rows(file)
        self.name = f"{array}/{chunk_name(file, len(metadata.shape))}"
        self.shape = (last - first, *metadata.shape[1:])
        self.dtype = np.dtype(metadata.dtype).newbyteorder("<")
        self.length, self.sha256 = files[self.name]  # with the zeros that the last one is filled up with
        self.row_bytes = self.dtype.itemsize * int(np.prod(self.shape[1:], dtype=np.int64))
        self.n_bytes = self.shape[0] * self.row_bytes
        self._place = place
        self._whole: np.ndarray | None = None

    def __len__(self) -> int:
        return self.shape[0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(read_whole(self._place, [self])[0], dtype=dtype, copy=copy)

    def __iter__(self) -> Iterator[Any]:
        return iter(np.asarray(self))

    def __getitem__(self, key: Any) -> Any:
        if self._whole is None and self.n_bytes > _SMALL_BYTES:
            if isinstance(key, int | np.integer):
                return self._rows([(int(key), int(key) + 1)])[0][0]
            if isinstance(key, slice) and key.step in (None, 1):
                start, stop, _ = key.indices(len(self))
                if (stop - start) * 2 < len(self):
                    return self._rows([(start, max(start, stop))])[0]
            if isinstance(key, np.ndarray) and key.ndim == 1 and len(key) <= _FEW_ROWS:
                rows = self._rows([(int(row), int(row) + 1) for row in key])
                return np.concatenate(rows) if rows else np.empty((0, *self.shape[1:]), self.dtype)
        return np.asarray(self)[key]

    @property
    def whole(self) -> np.ndarray | None:
        """All rows, where they have been fetched."""
        return self._whole

    def keep(self, data: bytes | None) -> np.ndarray:
        """Take the content of the file, once it is found to be what the manifest records."""
        where = self._place.path / self.name
        if data is None:
            raise IndexDamaged(f"{where} is missing", fix=RESTORE)
        if len(data) != self.length:
            raise IndexDamaged(f"{where} should have {self.length:,} bytes, has {len(data):,}", fix=RESTORE)
        if hashlib.sha256(data).hexdigest() != self.sha256:
            raise IndexDamaged(f"{where} has other content than the manifest records", fix=RESTORE)
        self._whole = self._as_rows(data, self.shape[0])
        return self._whole

    def _rows(self, spans: Sequence[tuple[int, int]]) -> list[np.ndarray]:
        """Rows start … stop-1 of each span."""
        asked = [(start * self.row_bytes, stop * self.row_bytes) for start, stop in spans]
        wanted = [span for span in asked if span[0] < span[1]]
        found = iter(self._place.fetch([(self.name, span) for span in wanted]))
        rows = []
        for start, stop in asked:
            data = next(found) if start < stop else b""
            if data is None or len(data) != stop - start:  # a server that knows no ranges, or a damaged file
                whole = self.keep(data)
                return [whole[start:stop] for start, stop in spans]
            rows.append(self._as_rows(data, (stop - start) // self.row_bytes))
        return rows

    def _as_rows(self, data: bytes, count: int) -> np.ndarray:
        values = int(np.prod(self.shape[1:], dtype=np.int64)) * count
        flat = np.frombuffer(data, self.dtype, values) if values else np.empty(0, self.dtype)
        return flat.reshape(count, *self.shape[1:])


def read_whole(place: Stored, chunks: Sequence[StoredChunk]) -> list[np.ndarray]:
    """All rows of chunk files; what is not there yet is fetched, and kept."""
    missing = [chunk for chunk in chunks if chunk.whole is None]
    for chunk, data in zip(missing, place.fetch([(chunk.name, None) for chunk in missing]), strict=True):
        chunk.keep(data)
    return [chunk.whole for chunk in chunks if chunk.whole is not None]


class StoredArray(ShardedArray):
    """An array in a store, read as a ShardedArray is."""

    def __init__(self, place: Stored, chunks: Sequence[StoredChunk]) -> None:
        super().__init__(chunks)
        self._place = place
        self._chunks = list(chunks)

    @property
    def shards(self) -> list[np.ndarray]:
        return read_whole(self._place, self._chunks)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        pieces = self.shards
        return np.asarray(pieces[0] if len(pieces) == 1 else np.concatenate(pieces), dtype=dtype, copy=copy)


def open_place(given: str | os.PathLike[str] | RemotePath | Store) -> Place:
    """The place that a path, a URL or a zarr store is; whether there is an index in it is for others to say.

    Raises
    ------
    ExtraMissing          a URL needs a package that is not installed
    IndexUnreachable      a URL of an unknown kind
    IndexDamaged          a file that ends in .zip is no whole zip file
    """
    if not isinstance(given, str | os.PathLike | RemotePath):
        return _open_given(given)
    where = locate(given)
    if isinstance(where, RemotePath):
        return _open_url(where)
    path = Path(os.path.abspath(where))  # noqa: PTH100 (resolve() would follow links)
    if path.is_file() and (path.suffix == ".zip" or zipfile.is_zipfile(path)):
        return _open_zip(path)
    return Directory(path)


def _open_given(store: Store) -> Stored:
    from zarr.storage import StorePath

    opened = _wait(StorePath.open(store, path="", mode="r"))
    return Stored(opened.store, RemotePath(str(store).rstrip("/")))


def _open_zip(path: Path) -> Stored:
    """The index at the root of a zip file, or in its only directory."""
    from zarr.storage import ZipStore

    try:
        store = _wait(ZipStore.open(path, mode="r"))
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except zipfile.BadZipFile as error:
        raise IndexDamaged(f"{path} is no whole zip file: {error}", fix=RESTORE) from error
    tops = {name.partition("/")[0] for name in names}
    inside = len(tops) == 1 and ZARR_JSON not in tops
    return Stored(store, path, f"{tops.pop()}/" if inside else "")


def _open_url(where: RemotePath) -> Stored:
    try:
        from zarr.storage import FsspecStore

        options: dict[str, Any] = {}
        plain = where.url.lower().startswith(("http://", "https://"))
        if plain:
            import aiohttp

            # aiohttp's own limit is five minutes for a whole file, however large and well on its way
            patience = aiohttp.ClientTimeout(
                total=None, sock_connect=_CONNECT_SECONDS, sock_read=_SILENT_SECONDS
            )
            options["client_kwargs"] = {"timeout": patience}
        store = FsspecStore.from_url(where.url, storage_options=options, read_only=True)
    except ImportError as error:
        raise _extra_missing(where, error) from error
    except Exception as error:  # every kind of URL is understood, or not, by a library of its own
        raise _unreachable(where, error) from error
    # what a web server lists, if it does, is a page for people
    return Stored(store, where, lists=not plain)


def _wait(coroutine: Coroutine[Any, Any, _T]) -> _T:
    """The result of a coroutine, run in zarr's own event loop: a store's connections stay in one loop."""
    from zarr.core.sync import sync

    return sync(coroutine)


def is_forbidden(error: BaseException | None) -> bool:
    """Whether a store's error says that this may not be read, as some say of what is not there."""
    return isinstance(error, PermissionError) or getattr(error, "status", None) == 403


def _unreachable(where: Location, error: Exception) -> IndexUnreachable:
    said = without_password(" ".join(str(error).split())) or type(error).__name__
    return IndexUnreachable(
        f"{where} cannot be read: {said}", fix="check the URL, the network, and whether you may read it"
    )


def _extra_missing(where: Location, error: ImportError) -> ExtraMissing:
    in_extra = re.match(r"(zip::)?(https?|s3a?)://", str(where), re.IGNORECASE)
    return ExtraMissing(
        f"{where} needs a Python package that is not installed: {error}",
        fix="pip install 'stride-attribution[remote]'"
        if in_extra
        else "install it: fsspec reads such URLs with it",
    )


def _read_only(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array
