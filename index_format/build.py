"""A build in progress: it survives kills and full disks, and appears by one rename.

TARGET.partial/
  lock             held while a process builds
  journal.jsonl    header, commits, publication
  data/            becomes TARGET
  scratch/         files of the builder's own (training checkpoints); never published
  replaced/        the old TARGET, where the filesystem cannot exchange two directories
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np

from index_format import durable
from index_format.confined import refuse_strange_files, wrote
from index_format.durable import Journal
from index_format.errors import IndexDamaged, IndexExists, IndexIncomplete, IndexVersionError
from index_format.layout import FORMAT_VERSION, SHARD_BYTES, find_spec, partial_path
from index_format.manifest import (
    MANIFEST,
    MOST_AXES,
    MOST_VALUES,
    ZARR_JSON,
    Files,
    array_json,
    encode_manifest,
    group_json,
    read_manifest,
)
from index_format.shards import ShardedArray, ShardWriter

_T = TypeVar("_T")
_OWN_NAMES = {"lock", "journal.jsonl", "data", "scratch", "replaced"}


class Build:
    """A build in progress; IndexWriter and GroupWriter say of what.

    Use it as a context manager. After a crash, a writer with the same build key goes on from the last commit,
    and the result is the same, bit for bit.

    Attributes
    ----------
    path : Path           where the result will be
    state : dict | None   what the last commit recorded; None before the first
    """

    def __init__(
        self,
        path: Path,
        *,
        prefix: str,
        build_key: str,
        overwrite: bool,
        shard_bytes: int = SHARD_BYTES,
        extends: str | None = None,
    ) -> None:
        self.path = path
        self.state: dict[str, Any] | None = None
        self._partial = partial_path(self.path)
        self._data = self._partial / "data"
        self._prefix = prefix  # of array names that is not part of their path below data/
        self._key = build_key
        # a group, and what an append has made, take the place of what they grew from
        self._replaces = overwrite or prefix != "" or extends is not None
        self._extends = extends
        self._shard_bytes = shard_bytes
        self._arrays: dict[str, ShardWriter] = {}
        self._usable = False
        self._resumed = False
        self._journal: Journal | None = None
        self._refuse_foreign()
        if not self._partial.exists():
            self._check_free()
        self._lock = durable.DirectoryLock(self._partial)
        try:
            self._begin(overwrite)
            self._usable = True
        except BaseException:
            self.close()
            raise

    # ---- for builders ----

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
        """Names of the arrays begun so far."""
        return list(self._arrays)

    def read(self, name: str, start: int, stop: int) -> np.ndarray:
        """Copy rows start … stop-1 of what was appended so far."""
        return np.array(self.view(name)[start:stop])

    def view(self, name: str) -> np.ndarray | ShardedArray:
        """Map all rows appended so far, read-only; rows appended later are not in it."""
        self._check_usable()
        if name not in self._arrays:
            raise KeyError(f"nothing was appended to {name}")
        return self._guarded(self._arrays[name].view)

    def commit(self, state: dict[str, Any]) -> None:
        """Make everything appended so far, and `state` (a JSON object), the point that a resume starts from.

        Data is synced before the journal line that names it is written.
        """
        self._check_usable()
        self._guarded(lambda: self._commit(state))

    def scratch_path(self, name: str) -> Path:
        """Return the path of a file or directory of the builder's own, kept for a resume, never published.

        The builder writes it durably, and tells from `state` which one is good.
        """
        if Path(name).name != name:
            raise ValueError(f"a scratch file's name has no directories, found {name!r}")
        self._check_usable()
        durable.make_directory(self._partial / "scratch")
        return self._partial / "scratch" / name

    def close(self) -> None:
        """Let go of the build. What is committed stays for a resume; with nothing committed nothing stays."""
        self._usable = False
        for array in self._arrays.values():
            array.close()
        self._arrays = {}
        if not self._lock.held:
            return
        if self._journal is None:
            empty = all(entry.name == "lock" for entry in self._partial.iterdir())
        else:
            empty = not self._has_progress()
        if empty:
            self._remove()
        if self._journal is not None:
            self._journal.close()
            self._journal = None
        self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- for subclasses ----

    def _groups(self) -> tuple[str, ...]:
        """Groups inside data/; none where data/ is one group itself."""
        return ()

    def _populate(self) -> None:
        """Fill data/ with what an extension starts from."""
        raise NotImplementedError

    def _validate(self, attributes: Mapping[str, Any]) -> None:
        """Raise ValueError when what would be published is incomplete."""

    def _prepare(self) -> None:
        """Add to data/ what is published but is not under its manifest."""

    # ---- beginning and resuming ----

    def _refuse_foreign(self) -> None:
        """Refuse a TARGET.partial that no build has made, or that holds links and devices."""
        there = self._partial
        if not there.exists():
            return
        names = {entry.name for entry in there.iterdir()} if there.is_dir() else {there.name}
        if names - _OWN_NAMES or ("journal.jsonl" not in names and names - {"lock"}):
            raise IndexExists(
                f"{self._partial} is in the way of a build, and no build has made it", fix="move it away"
            )
        refuse_strange_files(self._partial)

    def _check_free(self) -> None:
        if os.path.lexists(self.path) and not self._replaces:
            raise IndexExists(
                f"{self.path} already exists", fix="give another path, or replace it with --overwrite"
            )

    def _open_journal(self) -> Journal:
        journal = Journal(self._partial / Journal.NAME)
        if not _plausible(journal.entries, self._prefix):
            journal.close()
            raise IndexDamaged(
                f"{journal.path} is not what a build writes",
                fix=f"delete {self._partial}, and rerun the command from the start",
            )
        self._journal = journal
        return journal

    def _begin(self, overwrite: bool) -> None:
        """Go on from the last commit of the same build, or begin anew with a header."""
        # 1. a publication that was cut off is undone or finished: between the two renames of a filesystem
        # that cannot exchange, the old one goes back; after them, only the clearing up is missing
        replaced = self._partial / "replaced"
        if replaced.exists() and not os.path.lexists(self.path):
            replaced.rename(self.path)
        journal = self._open_journal()
        last = journal.entries[-1] if journal.entries else {}
        if last.get("kind") == "publish" and _manifest_digest(self.path) == last["digest"]:
            journal = self._clear()
        self._check_free()
        # 2. an unfinished build of another release, or from other input, is refused or discarded
        key = {"build_key": self._key, "extends": self._extends}
        if journal.entries:
            header = journal.entries[0]
            other = header["format_version"] != FORMAT_VERSION
            if other and not overwrite:
                raise IndexVersionError(
                    f"{self._partial} was begun in format version {header['format_version']}, "
                    f"this release writes {FORMAT_VERSION}",
                    fix="finish it with the release that began it, or discard it with --overwrite",
                )
            self._resumed = not other and all(header.get(name) == value for name, value in key.items())
            if not self._resumed:
                if self._has_progress() and not overwrite:
                    discard = "discard it with --overwrite" if self._extends is None else "delete it"
                    raise IndexIncomplete(
                        f"{self._partial} is an unfinished build from other input or settings",
                        fix=f"resume it with the command that began it, or {discard}",
                    )
                journal = self._clear()
        # 3. a new build begins with a header
        if not self._resumed:
            sizes = {"format_version": FORMAT_VERSION, "shard_bytes": self._shard_bytes}
            journal.write({"kind": "header", **sizes, **key})
            durable.sync_directory(self._partial)
            durable.sync_directory(self._partial.parent)
        # 4. its arrays go back to the last commit; those of an extension start as the old index's
        self._shard_bytes = journal.entries[0]["shard_bytes"]
        durable.make_directory(self._data)
        self._restore(journal)
        if self._extends is not None and all(entry["kind"] != "commit" for entry in journal.entries):
            self._populate()
            self._commit(None)

    def _restore(self, journal: Journal) -> None:
        """Bring data/ back to the last commit: arrays cut to their committed lengths, nothing else there."""
        # 1. what the commits say: lengths of the last one, digests of all
        last: dict[str, Any] = {"arrays": {}, "open": {}, "state": None}
        digests: dict[str, dict[int, str]] = {}
        for entry in journal.entries:
            if entry["kind"] == "commit":
                last = {"open": {}, **entry}
                for name, sealed in entry["sealed"].items():
                    digests.setdefault(name, {}).update((int(file), sha) for file, sha in sealed.items())
        self.state = last["state"]
        # 2. the arrays at these lengths
        kept: set[Path] = set()
        for name, (dtype, tail, length) in last["arrays"].items():
            array = self._writer(name, dtype, tuple(tail), length=length, digests=digests.get(name))
            self._arrays[name] = array
            array.take_up(last["open"].get(name))
            kept.update(path for path, _ in array.file_bytes())
        # 3. whatever was written after the commit goes
        for directory, _, names in os.walk(self._data):
            for path in (Path(directory, name) for name in names):
                if path not in kept:
                    path.unlink()

    # ---- arrays and commits ----

    def _writer(self, name: str, dtype: str, tail: tuple[int, ...], **state: Any) -> ShardWriter:
        directory = self._data / name.removeprefix(self._prefix)
        return ShardWriter(directory, dtype, tail, shard_bytes=self._shard_bytes, **state)

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
        return self._writer(name, values.dtype.name, values.shape[1:])

    def _commit(self, state: dict[str, Any] | None) -> None:
        # 1. content of all files, then the directory entries of new ones
        any_new = False
        for array in self._arrays.values():
            array.sync()
            if array.has_new_files:
                durable.sync_tree(array.directory)
                durable.sync_directory(array.directory.parent)
                array.has_new_files, any_new = False, True
        if any_new:
            durable.sync_directory(self._data)
            durable.sync_directory(self._partial)
        # 2. the line that names them
        arrays = self._arrays.items()
        assert self._journal is not None
        self._journal.write(
            {
                "kind": "commit",
                "arrays": {name: [each.dtype.name, each.tail, each.length] for name, each in arrays},
                "sealed": {
                    name: {str(file): each.digests[file] for file in each.unsaved}
                    for name, each in arrays
                    if each.unsaved
                },
                "open": {name: each.open_digest for name, each in arrays if each.open_digest},
                "state": state,
            }
        )
        for array in self._arrays.values():
            array.unsaved.clear()
        self.state = self._journal.entries[-1]["state"]

    # ---- publication ----

    def _publish(self, attributes: Mapping[str, Any]) -> None:
        self._check_usable()
        if "stride" in attributes:
            raise ValueError('publish() takes what is under the key "stride", not the key itself')
        attributes = {**attributes, "build_key": self._key}
        self._validate(attributes)
        self._guarded(lambda: self._finish(attributes))

    def _finish(self, attributes: Mapping[str, Any]) -> None:
        self._usable = False  # whatever happens now, what was appended is complete or lost
        # 1. complete data/: last files, zarr.json of every node, the manifest
        files: Files = {}
        for array in self._arrays.values():
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
        # 2. one rename, or exchange, after a line that tells the next build what to look for
        assert self._journal is not None
        self._journal.write({"kind": "publish", "digest": digest})
        durable.put_in_place(self._data, self.path, self._partial, replace=self._replaces)
        if not self._resumed and self._extends is None:  # else some of it was written by others
            wrote(self.path, ((name, sha256) for name, (_, sha256) in files.items()))
        self._remove()

    def _write_json(self, directory: Path, data: bytes, files: Files) -> None:
        durable.make_directory(directory)
        path = directory / ZARR_JSON
        durable.write_file(path, data)
        files[path.relative_to(self._data).as_posix()] = (len(data), hashlib.sha256(data).hexdigest())

    # ---- what is in the partial directory ----

    def _has_progress(self) -> bool:
        """Check for what a resume would go on from: a commit, or a file of the builder's own."""
        scratch = self._partial / "scratch"
        entries = [] if self._journal is None else self._journal.entries
        # the starting point of an extension is committed with state None, and can be made again
        committed = any(entry.get("state") is not None for entry in entries)
        return committed or (scratch.is_dir() and any(scratch.iterdir()))

    def _clear(self) -> Journal:
        """Delete what an earlier build has left; return an empty journal."""
        self._delete()
        return self._open_journal()

    def _delete(self) -> None:
        """Delete all but the lock, the journal after the data."""
        for name in ("data", "scratch", "replaced"):
            shutil.rmtree(self._partial / name, ignore_errors=True)
        if self._journal is not None:
            self._journal.close()
            self._journal = None
        (self._partial / Journal.NAME).unlink(missing_ok=True)

    def _remove(self) -> None:
        """Delete the partial directory, the lock last."""
        self._delete()
        self._lock.remove()
        try:
            self._partial.rmdir()
            durable.sync_directory(self._partial.parent)
        except OSError:
            pass  # the next build has already begun in it

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


def _manifest_digest(path: Path) -> str | None:
    """Read the digest of the manifest at `path`; None when there is none that is whole."""
    try:
        return read_manifest(path)[1]
    except IndexDamaged:
        return None


def _plausible(entries: list[dict[str, Any]], prefix: str) -> bool:
    """Check that a build of these arrays could have written a journal.

    It may come from anybody, and names in it become paths.
    """
    try:
        for number, entry in enumerate(entries):
            kind = entry["kind"]
            if (kind == "header") != (number == 0):
                return False
            if kind == "header":
                if entry["format_version"] != FORMAT_VERSION:
                    return True  # another release's: refused as that
                keys = isinstance(entry["build_key"], str) and isinstance(entry["extends"], str | None)
                if not keys or type(entry["shard_bytes"]) is not int or entry["shard_bytes"] <= 0:
                    return False
            elif kind == "commit":
                if not _plausible_commit(entry, prefix):
                    return False
            elif kind != "publish" or not isinstance(entry["digest"], str):
                return False
    except (KeyError, TypeError, ValueError, AttributeError):
        return False
    return True


def _plausible_commit(entry: Mapping[str, Any], prefix: str) -> bool:
    """Check one commit; entries of wrong types raise what taking them apart raises."""
    for name, (dtype, tail, length) in entry["arrays"].items():
        if not name.startswith(prefix) or dtype not in find_spec(name).dtypes:
            return False
        if not isinstance(tail, list) or len(tail) >= MOST_AXES or 0 in tail:
            return False
        if any(type(size) is not int or not 0 <= size < MOST_VALUES for size in (*tail, length)):
            return False
    names = set(entry["arrays"])
    files = [file for digests in entry["sealed"].values() for file in digests]
    return (
        set(entry.get("open", {})) <= names
        and set(entry["sealed"]) <= names
        and all(file.isdecimal() for file in files)
        and isinstance(entry["state"], dict | None)
    )
