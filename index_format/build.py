"""A build in progress: TARGET.partial, its lock, its journal, its arrays, and their publication as TARGET.

TARGET.partial/
  lock             held while a process builds
  journal.jsonl    header, commits, publication
  data/            what becomes TARGET, by one rename
  scratch/         files of the builder's own (training checkpoints); never published
  replaced/        the old TARGET, where the filesystem cannot exchange two directories
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import numpy as np

from index_format import durable
from index_format.confined import open_inside, refuse_strange_files
from index_format.errors import (
    IndexDamaged,
    IndexExists,
    IndexIncomplete,
    IndexVersionError,
)
from index_format.journal import Journal
from index_format.layout import FORMAT_VERSION, SHARD_BYTES, find_spec
from index_format.manifest import MANIFEST, encode_manifest, read_manifest
from index_format.metadata import (
    MOST_AXES,
    MOST_VALUES,
    ZARR_JSON,
    array_json,
    chunk_file,
    group_json,
    rows_per_file,
)
from index_format.shards import ShardedArray, ShardWriter
from index_format.soundness import Soundness

_T = TypeVar("_T")
_OWN_NAMES = {"lock", "journal.jsonl", "data", "scratch", "replaced"}


class Build:
    """What IndexWriter and GroupWriter share; see there.

    Attributes
    ----------
    path : Path           what is being built
    state : dict | None   what the last commit recorded; None before the first
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        prefix: str,
        build_key: str,
        overwrite: bool,
        replaces: bool,
        shard_bytes: int = SHARD_BYTES,
        extends: str | None = None,
    ) -> None:
        self.path = Path(os.path.abspath(path))  # noqa: PTH100 (resolve() would follow links)
        self.state: dict[str, Any] | None = None
        self._partial = partial_path(self.path)
        self._data = self._partial / "data"
        self._prefix = prefix  # of array names that is not part of their path below data/
        self._key = build_key
        self._replaces = replaces
        self._extends = extends
        self._shard_bytes = shard_bytes
        self._arrays: dict[str, ShardWriter] = {}
        self._journalled: dict[str, set[int]] = {}  # files whose digests the journal has
        self._usable = False
        self._committed = False
        self._resumed = False
        self._refuse_foreign()
        if not self._partial.exists():
            self._check_free()
        self._lock = durable.DirectoryLock(self._partial)
        self._journal: Journal | None = None
        try:
            self._recover()
            self._check_free()
            self._begin(overwrite)
            self._usable = True
        except BaseException:
            self.close()
            raise

    # ---- what a builder calls ----

    def append(self, name: str, values: np.ndarray) -> None:
        """Append rows to array `name` along axis 0; the first append (of no rows, too) creates it.

        Parameters
        ----------
        name : str          "group/array" of layout.ARRAYS
        values : ndarray    of a dtype the layout allows; dtype and row shape are those of the first append

        Raises
        ------
        ValueError          no such array, or another number of axes or another row shape
        TypeError           another dtype
        StorageFull         the disk is full; close() and resume later
        """
        self._check_usable()
        array = self._arrays.get(name)
        if array is None:
            array = self._new_array(name, values)
            self._arrays[name] = array
        elif values.dtype.name != array.dtype.name:
            raise TypeError(f"{name} is {array.dtype.name}, values are {values.dtype.name}")
        elif values.shape[1:] != array.tail or values.ndim == 0:
            raise ValueError(f"rows of {name} have shape {array.tail}, values have {values.shape[1:]}")
        self._guarded(lambda: array.append(values))

    def length(self, name: str) -> int:
        """Rows of array `name` so far; 0 when nothing was appended."""
        return self._arrays[name].length if name in self._arrays else 0

    def names(self) -> list[str]:
        """The arrays begun so far."""
        return list(self._arrays)

    def read(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows start … stop-1 of what was appended so far, as a copy."""
        return np.array(self.view(name)[start:stop])

    def view(self, name: str) -> np.ndarray | ShardedArray:
        """All rows appended so far, mapped read-only; rows appended later are not in it."""
        self._check_usable()
        if name not in self._arrays:
            raise KeyError(f"nothing was appended to {name}")
        array = self._arrays[name]
        return self._guarded(array.view)

    def commit(self, state: dict[str, Any]) -> None:
        """Make everything appended so far, and `state` (a JSON object), what a resume starts from.

        Data is synced before the journal line that speaks of it is written.
        """
        self._check_usable()
        self._guarded(lambda: self._commit(state))

    def close(self) -> None:
        """Let go of the build. What is committed stays for a resume; with nothing committed nothing stays."""
        self._usable = False
        for array in self._arrays.values():
            array.close()
        self._arrays = {}
        if self._lock.held:
            if (self._journal is None and not self._has_content()) or (
                self._journal is not None and not self._committed and not self._has_scratch()
            ):
                self._remove()
            if self._journal is not None:
                self._journal.close()
                self._journal = None
            self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def scratch_path(self, name: str) -> Path:
        """A file or directory of the builder's own (a training checkpoint, parts of a build): kept for a
        resume, deleted by `publish`.

        Writing it durably, and telling from `state` which one is good, is the builder's business.
        """
        if Path(name).name != name:
            raise ValueError(f"a scratch file's name has no directories, found {name!r}")
        self._check_usable()
        durable.make_directory(self._partial / "scratch")
        return self._partial / "scratch" / name

    # ---- beginning and resuming ----

    def _check_free(self) -> None:
        if os.path.lexists(self.path) and not self._replaces:
            raise IndexExists(
                f"{self.path} already exists", fix="give another path, or replace it with --overwrite"
            )

    def _recover(self) -> None:
        """Finish, or undo, a publication that an earlier process was killed in."""
        replaced = self._partial / "replaced"
        if replaced.exists() and not os.path.lexists(self.path):
            replaced.rename(self.path)
        self._open_journal()
        assert self._journal is not None
        last = self._journal.entries[-1] if self._journal.entries else {}
        if last.get("kind") == "publish" and _manifest_digest(self.path) == last["digest"]:
            # it was published; only the clearing up is missing
            self._remove()
            self._lock = durable.DirectoryLock(self._partial)
            self._open_journal()

    def _open_journal(self) -> None:
        journal = Journal(self._partial / Journal.NAME)
        if not _plausible(journal.entries, self._prefix):
            journal.close()
            raise IndexDamaged(
                f"{journal.path} is not what a build writes",
                fix=f"delete {self._partial}, and rerun the command from the start",
            )
        self._journal = journal
        # what an extension starts from is committed with state None, and can be made again
        self._committed = any(entry.get("state") is not None for entry in self._journal.entries)

    def _refuse_foreign(self) -> None:
        try:
            names = {entry.name for entry in self._partial.iterdir()}
        except FileNotFoundError:
            return
        except NotADirectoryError:
            names = {self._partial.name}
        if names - _OWN_NAMES or ("journal.jsonl" not in names and names - {"lock"}):
            raise IndexExists(
                f"{self._partial} is in the way of a build, and no build has made it", fix="move it away"
            )
        refuse_strange_files(self._partial)

    def _begin(self, overwrite: bool) -> None:
        assert self._journal is not None
        entries = self._journal.entries
        header = entries[0] if entries else None
        if header is not None and header["format_version"] != FORMAT_VERSION:
            raise IndexVersionError(
                f"{self._partial} was begun in format version {header['format_version']}, "
                f"this release writes {FORMAT_VERSION}",
                fix="finish it with the release that began it, or delete it",
            )
        same = header is not None and header["build_key"] == self._key and header["extends"] == self._extends
        self._resumed = same
        if header is not None and not same:
            if (self._committed or self._has_scratch()) and not overwrite:
                raise IndexIncomplete(
                    f"{self._partial} is an unfinished build from other input or settings",
                    fix="resume it with the command that began it, or discard it with --overwrite",
                )
            self._discard()
            header = None
        if header is None:
            self._journal.write(
                {
                    "kind": "header",
                    "format_version": FORMAT_VERSION,
                    "build_key": self._key,
                    "extends": self._extends,
                    "shard_bytes": self._shard_bytes,
                }
            )
            durable.sync_directory(self._partial)
            durable.sync_directory(self._partial.parent)
        self._shard_bytes = self._journal.entries[0]["shard_bytes"]
        durable.make_directory(self._data)
        self._restore()
        if self._extends is not None and not any(
            entry["kind"] == "commit" for entry in self._journal.entries
        ):
            self._populate()
            self._commit(None)

    def _discard(self) -> None:
        assert self._journal is not None
        self._journal.close()
        for name in ("data", "scratch"):
            shutil.rmtree(self._partial / name, ignore_errors=True)
        (self._partial / Journal.NAME).unlink()
        self._open_journal()

    def _restore(self) -> None:
        """Bring data/ back to the last commit: arrays cut to their committed lengths, nothing else there."""
        assert self._journal is not None
        lengths: dict[str, Any] = {}
        begun: dict[str, str] = {}
        for entry in self._journal.entries:
            if entry["kind"] == "commit":
                lengths, self.state, begun = entry["arrays"], entry["state"], entry.get("open", {})
                for name, sealed in entry["sealed"].items():
                    self._journalled.setdefault(name, set()).update(int(file) for file in sealed)
        digests: dict[str, dict[int, str]] = {}
        for entry in self._journal.entries:
            for name, sealed in entry.get("sealed", {}).items():
                digests.setdefault(name, {}).update({int(file): value for file, value in sealed.items()})
        sizes: dict[Path, int] = {}
        for name, (dtype, tail, length) in lengths.items():
            array = ShardWriter(
                self._directory(name),
                dtype,
                tuple(tail),
                shard_bytes=self._shard_bytes,
                length=length,
                digests=digests.get(name),
            )
            self._arrays[name] = array
            row_bytes = array.dtype.itemsize * int(np.prod(tail, dtype=np.int64))
            rows = rows_per_file(row_bytes, self._shard_bytes)
            for file in range(-(-length // rows)):
                path = chunk_file(array.directory, file, 1 + len(tail))
                size = min(rows, length - file * rows) * row_bytes
                actual = path.stat().st_size if path.is_file() else -1
                if actual < size:  # at the first: a journal may speak of any number of files
                    raise IndexDamaged(
                        f"the unfinished build lost data: {path} should have {size:,} bytes, "
                        + (f"has {actual:,}" if actual >= 0 else "is missing"),
                        fix=f"discard it with --overwrite, or delete {self._partial}",
                    )
                sizes[path] = size
        for directory, _, names in os.walk(self._data):
            for found in names:
                path = Path(directory) / found
                if path not in sizes:
                    path.unlink()
        for path, size in sizes.items():
            if path.stat().st_size > size:
                opened = open_inside(self._data, path.relative_to(self._data).as_posix(), os.O_RDWR)
                os.ftruncate(opened, size)
                os.close(opened)
        for name, digest in begun.items():
            self._arrays[name].take_up(digest)

    def _populate(self) -> None:
        """Fill data/ with what an extension starts from."""
        raise NotImplementedError

    # ---- arrays ----

    def _directory(self, name: str) -> Path:
        return self._data / name.removeprefix(self._prefix)

    def _new_array(self, name: str, values: np.ndarray) -> ShardWriter:
        if self._prefix and not name.startswith(self._prefix):
            raise ValueError(f"this writer builds {self._prefix}*, found {name!r}")
        spec = find_spec(name)
        if not self._prefix and name.split("/")[0] not in self._groups():
            raise ValueError(f"{name} belongs to a stage; write it with GroupWriter")
        if values.dtype.name not in spec.dtypes:
            raise TypeError(f"{name} should be {' or '.join(spec.dtypes)}, found {values.dtype.name}")
        if values.ndim == 0 or (spec.shape != ("...",) and values.ndim != len(spec.shape)):
            terms = ", ".join(str(size) for size in spec.shape)
            raise ValueError(f"{name} has shape ({terms}), found values of shape {values.shape}")
        if 0 in values.shape[1:]:
            raise ValueError(f"rows of {name} are empty: values have shape {values.shape}")
        return ShardWriter(
            self._directory(name), values.dtype.name, values.shape[1:], shard_bytes=self._shard_bytes
        )

    def _groups(self) -> tuple[str, ...]:
        """The groups inside data/; none where data/ is one group itself."""
        return ()

    def _commit(self, state: dict[str, Any] | None) -> None:
        assert self._journal is not None
        for name, array in self._arrays.items():
            array.sync()
            if array.has_new_files:
                durable.sync_tree(array.directory)
                durable.sync_directory(array.directory.parent)
                durable.sync_directory(self._data)
                durable.sync_directory(self._partial)
                array.has_new_files = False
            self._journalled.setdefault(name, set())
        sealed = {
            name: {str(file): digest for file, digest in array.digests.items() if file not in known}
            for name, known in self._journalled.items()
            if (array := self._arrays[name]).digests.keys() - known
        }
        begun = {name: array.open_digest for name, array in self._arrays.items() if array.open_digest}
        self._journal.write(
            {
                "kind": "commit",
                "arrays": {
                    name: [array.dtype.name, array.tail, array.length] for name, array in self._arrays.items()
                },
                "sealed": sealed,
                "open": begun,
                "state": state,
            }
        )
        for name, files in sealed.items():
            self._journalled[name].update(int(file) for file in files)
        self._committed |= state is not None
        self.state = self._journal.entries[-1]["state"]

    # ---- publication ----

    def _validate(self, attributes: Mapping[str, Any], names: Iterable[str]) -> None:
        """ValueError when what would be published is incomplete."""

    def _prepare(self) -> None:
        """Add to data/ what is published but is not under its manifest."""

    def _publish(self, attributes: Mapping[str, Any]) -> None:
        self._check_usable()
        names = list(self._arrays)
        if "stride" in attributes:
            raise ValueError('publish() takes what is under the key "stride", not the key itself')
        attributes = {**attributes, "build_key": self._key}
        self._validate(attributes, names)
        self._guarded(lambda: self._finish(attributes, names))

    def _finish(self, attributes: Mapping[str, Any], names: list[str]) -> None:
        assert self._journal is not None
        self._usable = False  # whatever happens now, what was appended is complete or lost
        files: dict[str, tuple[int, str]] = {}
        for name in names:
            array = self._arrays[name]
            for path, length, digest in array.finish():
                files[path.relative_to(self._data).as_posix()] = (length, digest)
            self._write_json(array.directory, array_json(array.metadata), files)
        self._write_json(self._data, group_json(attributes), files)
        for group in self._groups():
            self._write_json(self._data / group, group_json(), files)
        manifest, digest = encode_manifest(files)
        durable.write_file(self._data / MANIFEST, manifest)
        self._prepare()
        durable.sync_tree(self._data)
        self._journal.write({"kind": "publish", "digest": digest})
        if os.path.lexists(self.path) and self._replaces:
            durable.exchange(self._data, self.path, self._partial / "replaced")
        else:
            durable.rename_new(self._data, self.path)
        durable.sync_directory(self.path.parent)
        if not self._resumed and self._extends is None:  # else some of it was written by others
            Soundness(self.path).wrote((name, sha256) for name, (_, sha256) in files.items())
        self._remove()

    def _write_json(self, directory: Path, data: bytes, files: dict[str, tuple[int, str]]) -> None:
        durable.make_directory(directory)
        path = directory / ZARR_JSON
        durable.write_file(path, data)
        files[path.relative_to(self._data).as_posix()] = (len(data), hashlib.sha256(data).hexdigest())

    # ---- endings ----

    def _remove(self) -> None:
        """Delete the partial directory; the journal after the data, the lock last."""
        for name in ("data", "scratch", "replaced"):
            shutil.rmtree(self._partial / name, ignore_errors=True)
        if self._journal is not None:
            self._journal.close()
            self._journal = None
        (self._partial / Journal.NAME).unlink(missing_ok=True)
        self._lock.remove()
        try:
            self._partial.rmdir()
            durable.sync_directory(self._partial.parent)
        except OSError:
            pass  # the next build has already begun in it

    def _has_content(self) -> bool:
        return any(entry.name != "lock" for entry in self._partial.iterdir())

    def _has_scratch(self) -> bool:
        scratch = self._partial / "scratch"
        return scratch.is_dir() and any(scratch.iterdir())

    def _check_usable(self) -> None:
        if not self._usable:
            raise RuntimeError(
                f"the writer of {self.path} is closed, published or has failed; open another to resume"
            )

    def _guarded(self, action: Callable[[], _T]) -> _T:
        """Run `action`; when it fails, files and counters disagree, and nothing more is accepted."""
        try:
            return action()
        except BaseException:  # an interrupt leaves them as torn as a full disk does
            self._usable = False
            raise


def partial_path(path: Path) -> Path:
    """Where the build of `path` is made: PATH.partial."""
    return path.with_name(path.name + ".partial")


def _manifest_digest(path: Path) -> str | None:
    """The digest of the manifest at `path`; None when there is none that is whole."""
    try:
        return read_manifest(path)[1]
    except IndexDamaged:
        return None


def _plausible(entries: list[dict[str, Any]], prefix: str) -> bool:
    """Whether a journal says what a build of these arrays could have written: it may come from anybody, and
    names in it become paths."""
    try:
        for number, entry in enumerate(entries):
            kind = entry["kind"]
            if (kind == "header") != (number == 0) or kind not in ("header", "commit", "publish"):
                return False
            if kind == "header" and entry["format_version"] != FORMAT_VERSION:
                return True  # another release's: refused as that
            if kind == "header":
                keys = isinstance(entry["build_key"], str) and isinstance(entry["extends"], str | None)
                if not keys or type(entry["shard_bytes"]) is not int or entry["shard_bytes"] <= 0:
                    return False
            elif kind == "commit":
                _check_commit(entry, prefix)
            elif not isinstance(entry["digest"], str):
                return False
    except (KeyError, TypeError, ValueError, AttributeError):
        return False
    return True


def _check_commit(entry: Mapping[str, Any], prefix: str) -> None:
    """ValueError, or what wrong types raise, where no build has written this."""
    for name, (dtype, tail, length) in entry["arrays"].items():
        known = name.startswith(prefix) and dtype in find_spec(name).dtypes
        if not known or not isinstance(tail, list) or len(tail) >= MOST_AXES:
            raise ValueError("no array of the layout")
        if any(type(size) is not int or not 0 <= size < MOST_VALUES for size in (*tail, length)):
            raise ValueError("no array of the layout")
        if 0 in tail:
            raise ValueError("rows of nothing")
    if not set(entry.get("open", {})) <= set(entry["arrays"]):
        raise ValueError("digests of no array")
    for name, digests in entry["sealed"].items():
        if name not in entry["arrays"] or not all(file.isdecimal() for file in digests):
            raise ValueError("files of no array")
    if not isinstance(entry["state"], dict | None):
        raise ValueError("no state")
