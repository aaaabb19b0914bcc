"""Writing an index: IndexWriter for corpus and design, GroupWriter for what a stage adds to it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from index_format import durable
from index_format.build import Build
from index_format.confined import refuse_strange_files
from index_format.design import offsets_of, row_sizes
from index_format.errors import RESTORE, IndexDamaged, IndexExists, IndexNotFound
from index_format.layout import ARRAYS, FORMAT_VERSION, ROOT_GROUPS, SHARD_BYTES, STAGE_GROUPS, partial_path
from index_format.location import Given, local_directory
from index_format.manifest import MANIFEST, ArrayMetadata, Files, check_contents, chunk_name, read_group
from index_format.reader import Index
from index_format.shards import ranges


class IndexWriter(Build):
    """Builds the corpus and the design of an index."""

    @classmethod
    def create(
        cls, path: Given, *, build_key: str, overwrite: bool = False, shard_bytes: int = SHARD_BYTES
    ) -> IndexWriter:
        """Begin, or resume, the build of the index at `path`.

        Parameters
        ----------
        path : path           where the index will be; missing parent directories are made
        build_key : str       digest of all that determines the result; an unfinished build is resumed where
                              it is the same
        overwrite : bool      discard an unfinished build with another key, and replace an index at `path`
                              when this one is published (until then the old one stays)
        shard_bytes : int     largest chunk file; part of the format of this index

        Raises
        ------
        IndexReadOnly         `path` is a URL or a zip file
        IndexExists           something is at `path` and `overwrite` is False; or it is no index
        IndexIncomplete       an unfinished build with another key is there and `overwrite` is False
        IndexBusy             another process is building there
        IndexDamaged          the unfinished build has lost committed data
        StorageFull           the disk is full
        """
        path = local_directory(path)
        if overwrite and os.path.lexists(path) and not (path / MANIFEST).is_file():
            raise IndexExists(f"{path} is no index, and is not overwritten", fix="give another path")
        return cls(path, prefix="", build_key=build_key, overwrite=overwrite, shard_bytes=shard_bytes)

    @classmethod
    def extend(cls, path: Given, *, build_key: str) -> IndexWriter:
        """Begin, or resume, an append to the index at `path`: a new index that starts as the old one.

        Arrays of corpus/ and design/ begin with their present rows, except design/row_offsets, which is
        written anew (`append_row_offsets`). Full chunk files are shared with the old index by hard links
        (copied where there are none). Stages' groups are taken over as they are at publication. The old index
        is readable, and unchanged, until the new one takes its place in one step.

        Raises
        ------
        IndexReadOnly                   `path` is a URL or a zip file
        IndexNotFound, IndexDamaged     there is no whole index at `path`
        IndexExists                     this very append (by build key) has been published already
        and what `create` raises
        """
        index = Index.open(local_directory(path))
        refuse_strange_files(index.directory)
        if index.attributes["build_key"] == build_key:
            raise IndexExists(f"{index.path} already contains this append", fix="nothing is left to do")
        return cls(
            index.directory,
            prefix="",
            build_key=build_key,
            overwrite=False,
            shard_bytes=index.attributes["shard_bytes"],
            extends=index.digest,
        )

    def append_strings(self, prefix: str, values: Sequence[str]) -> None:
        """Append UTF-8 strings to the pair ``<prefix>_bytes``, ``<prefix>_offsets``.

        Parameters
        ----------
        prefix : str      "corpus/document_id", "corpus/title" or "corpus/text"
        values : sequence of str; UnicodeEncodeError where one has a lone surrogate
        """
        encoded = [value.encode() for value in values]
        if self.length(f"{prefix}_offsets") == 0:
            self.append(f"{prefix}_offsets", np.zeros(1, np.int64))
        start = self.length(f"{prefix}_bytes")
        self.append(f"{prefix}_bytes", np.frombuffer(b"".join(encoded), np.uint8))
        ends = start + np.cumsum([len(value) for value in encoded], dtype=np.int64)
        self.append(f"{prefix}_offsets", ends)

    def append_row_offsets(self, n_subsets: int) -> None:
        """Append design/row_offsets: the running sum of the subsets' sizes in design/columns so far."""
        if self.length("design/row_offsets"):
            raise ValueError("design/row_offsets has been written already")
        sizes = np.zeros(n_subsets, np.int64)
        degree = self.view("design/columns").shape[1]
        for first, last in ranges(self.length("design/columns"), width=degree):
            # a copy of each block: pages of a map that has been read stay with the process
            sizes += row_sizes(self.read("design/columns", first, last), n_subsets)
        self.append("design/row_offsets", offsets_of(sizes))

    def publish(self, attributes: Mapping[str, Any]) -> None:
        """Complete the index and make it appear at its path; the writer is closed afterwards.

        Parameters
        ----------
        attributes : mapping      layout.ATTRIBUTES, without those that say "written by the writer"

        Raises
        ------
        ValueError      an array or attribute is missing, or sizes do not agree
        IndexExists     something has appeared at the path
        IndexBusy       (an append) a stage is running on the index that would be replaced
        StorageFull     the disk is full; resume later
        """
        self._publish({**attributes, "format_version": FORMAT_VERSION, "shard_bytes": self._shard_bytes})

    def _groups(self) -> tuple[str, ...]:
        return ROOT_GROUPS

    def _validate(self, attributes: Mapping[str, Any]) -> None:
        arrays = {name: array.metadata for name, array in self._arrays.items()}
        wrong = check_contents(attributes, arrays)
        if wrong:
            raise ValueError(f"the index is not complete: {'; '.join(wrong)}")

    def _populate(self) -> None:
        found = read_group(self.path, "")
        if found.digest != self._extends:
            changed = f"{self.path} has changed while an append to it began"
            raise IndexDamaged(changed, fix="rerun the command")
        for name, array in found.arrays.items():
            if not ARRAYS[name].derived:
                self._populate_array(name, array, found.files)

    def _populate_array(self, name: str, found: ArrayMetadata, files: Files) -> None:
        """Share all files of an array but the last; copy that one, because it will grow, and check it."""
        shape, n_files = found.shape, found.n_files
        digests: dict[int, str] = {}
        for file in range(n_files):
            relative = f"{name}/{chunk_name(file, len(shape))}"
            source, target = self.path / relative, self._data / relative
            expected = files[relative][1]
            digests[file] = expected
            if file < n_files - 1:
                durable.link_or_copy(source, target)
            elif durable.copy_file(source, target) != expected:
                raise IndexDamaged(f"{source} has other content than the manifest records", fix=RESTORE)
        array = self._writer(name, found.dtype, shape[1:], length=shape[0], digests=digests)
        array.take_up()
        array.has_new_files, array.unsaved = n_files > 0, set(array.digests)
        self._arrays[name] = array

    def _prepare(self) -> None:
        """Take the stages' groups over to an extended index, finished or not."""
        if self._extends is None:
            return
        for group in STAGE_GROUPS:
            unfinished = partial_path(self.path / group)
            if unfinished.is_dir():
                durable.DirectoryLock(unfinished).release()  # IndexBusy while the stage runs
                durable.link_tree(
                    unfinished, self._data / unfinished.name, skip=(durable.DirectoryLock.NAME,)
                )
            if (self.path / group).is_dir():
                durable.link_tree(self.path / group, self._data / group)


class GroupWriter(Build):
    """Builds the group that a stage adds to an index, as INDEX/<group>.partial; replaces INDEX/<group> whole.

    The group has a manifest of its own; the root's never changes.

    Parameters
    ----------
    index_path : path
    group : one of `layout.STAGE_GROUPS`
    build_key : str       digest of all that determines the result; an unfinished build is resumed where it is
                          the same
    overwrite : bool      discard an unfinished build with another key

    Raises
    ------
    IndexReadOnly         `index_path` is a URL or a zip file
    IndexNotFound         there is no index at `index_path`
    IndexIncomplete, IndexBusy, IndexDamaged, StorageFull      as IndexWriter.create
    """

    def __init__(
        self,
        index_path: Given,
        group: Literal["operators", "truth", "calibration", "run"],
        build_key: str,
        *,
        overwrite: bool = False,
        shard_bytes: int = SHARD_BYTES,
    ) -> None:
        if group not in STAGE_GROUPS:
            raise ValueError(f"stages keep {', '.join(STAGE_GROUPS)}, found {group!r}")
        directory = local_directory(index_path)
        if not (directory / MANIFEST).is_file():
            raise IndexNotFound(f"{index_path} is no index", fix="stride index build makes one")
        refuse_strange_files(directory)
        super().__init__(
            directory / group,
            prefix=f"{group}/",
            build_key=build_key,
            overwrite=overwrite,
            shard_bytes=shard_bytes,
        )

    def publish(self, attributes: Mapping[str, Any]) -> None:
        """Complete the group and put it in its place; the writer is closed afterwards.

        Parameters
        ----------
        attributes : mapping      what `Index.group_attributes` will return, with "build_key" and "arrays"
        """
        self._publish({**attributes, "arrays": sorted(self.names())})
