"""Reading an index: opening validates it, arrays are memory-mapped (or fetched), nothing is ever written."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from index_format.errors import (
    RESTORE,
    IndexDamaged,
    IndexFormatError,
    IndexMismatch,
    IndexReadOnly,
    StageMissing,
)
from index_format.group import (
    STAGE_COMMANDS,
    Group,
    read_attributes,
    read_group,
    read_stage,
    stage_command,
)
from index_format.layout import STAGE_GROUPS, check_arrays, check_attributes, find_spec
from index_format.location import RemotePath, local_directory
from index_format.metadata import ArrayMetadata
from index_format.offsets import offset_ends, offsets_wrong, ranges
from index_format.places import Directory, Place, open_place
from index_format.shards import ShardedArray

if TYPE_CHECKING:
    from zarr.abc.store import Store


class Index:
    """An index opened for reading.

    Attributes
    ----------
    path : Path or RemotePath      where it is; what is beside it, only of `directory`
    attributes : mapping      layout.ATTRIBUTES, read-only
    n_chunks, n_documents, n_tokens, n_subsets, degree, seed : int
    digest : str              of the root's manifest: changes with any content of corpus/ or design/
    """

    def __init__(self, place: Place, attributes: Mapping[str, Any], root: Group) -> None:
        self.path = place.path
        self._place = place
        self.attributes = MappingProxyType(dict(attributes))
        self._root = root
        self._stages: dict[str, Group] = {}
        self._views: dict[str, np.ndarray | ShardedArray] = {}
        self.digest = root.digest
        self.n_subsets: int = attributes["n_subsets"]
        self.degree: int = attributes["degree"]
        self.seed: int = attributes["seed"]
        self.n_chunks = root.arrays["corpus/chunk_offsets"].shape[0] - 1
        self.n_documents = root.arrays["corpus/document_offsets"].shape[0] - 1
        self.n_tokens = root.arrays["corpus/tokens"].shape[0]

    @classmethod
    def open(cls, path: str | os.PathLike[str] | RemotePath | Store, *, check: bool = True) -> Index:
        """Open the index at `path`.

        A directory is mapped. From a zip file, a URL (``https://…``, ``s3://…``, whatever fsspec reads) or a
        zarr store, arrays are fetched: small ones whole when they are asked for, large ones as far as they
        are read; an array read whole is kept in memory for as long as the index.

        Compared: the format version; the manifest with its own digest; the length of every file and the
        content of every zarr.json with the manifest; every array of layout.ARRAYS with its dtype and shape.
        A chunk file is compared with its SHA-256 when something of it is first read, unless that was done
        since it last changed (`index_format.soundness`). A stage's group (operators, truth) is checked in the
        same way when it is first asked for, so that a damaged one can be fitted again. What is fetched is
        compared when it is: whole files with their SHA-256, parts of files with the length asked for.

        Parameters
        ----------
        path : path, URL, or zarr store
        check : bool      False leaves out the files' lengths and the digests of zarr.json

        Raises
        ------
        IndexNotFound, IndexIncomplete, IndexVersionError, IndexDamaged
        IndexUnreachable, ExtraMissing      (a URL) there is no answer; a package is not installed
        """
        place = open_place(path)
        attributes = read_attributes(place)
        root = read_group(place, "", check=check)
        wrong = check_attributes(attributes)
        if not wrong:
            shapes = {name: array.shape for name, array in root.arrays.items()}
            dtypes = {name: array.dtype for name, array in root.arrays.items()}
            wrong = check_arrays(
                shapes, dtypes, n_subsets=attributes["n_subsets"], degree=attributes["degree"]
            )
        if wrong:
            raise IndexDamaged(f"{place.path}: {'; '.join(wrong)}", fix=RESTORE)
        return cls(place, attributes, root)

    @property
    def directory(self) -> Path:
        """The index's directory, for what is written in it or beside it; IndexReadOnly where it is none."""
        if isinstance(self._place, Directory):
            return self._place.path
        local_directory(self.path)
        raise IndexReadOnly(f"index {self.path} cannot be written", fix="copy it to a local directory first")

    @property
    def n_bytes(self) -> int:
        """Length of all files that the manifests list, of the index and of its stages."""
        groups = [self._root, *(self._stage(group) for group in STAGE_GROUPS if self.has(group))]
        return sum(length for group in groups for length, _ in group.files.values())

    def has(self, name: str) -> bool:
        """Whether there is such a group ("operators") or array ("operators/gates", "corpus/text_bytes")."""
        group, _, leaf = name.partition("/")
        if group in STAGE_GROUPS:
            if not self._place.has_group(group):
                return False
            return not leaf or name in self._stage(group).arrays
        return name in self._root.arrays or name in ("corpus", "design")

    @property
    def fitted_share(self) -> float:
        """Of its chunks, the share that was there when its operators were fitted: others were appended."""
        return float(self.shape("operators/seen")[0] / max(1, self.n_chunks))

    def names(self, group: str) -> list[str]:
        """The arrays of a group, sorted; StageMissing when its stage has not been run."""
        arrays = self._stage(group).arrays if group in STAGE_GROUPS else self._root.arrays
        return sorted(name for name in arrays if name.startswith(f"{group}/"))

    def array(self, name: str) -> np.ndarray | ShardedArray:
        """Array `name` ("group/array"), read-only, mapped rather than read; its files are compared with their
        digests, one in a single file now, those of several when they are first read.

        Returns
        -------
        np.memmap (an empty plain array where there are no rows), or ShardedArray where several files hold it;
        fetched, an array in memory or a ShardedArray

        Raises
        ------
        StageMissing      the stage has not been run, or the optional array was left out
        IndexDamaged      a file is not what was written (of several: when it is read)
        ValueError        the layout has no such array
        """
        find_spec(name)
        metadata = self._metadata(name)
        group = name.partition("/")[0]
        files = (self._stage(group) if group in STAGE_GROUPS else self._root).files
        return self._place.array(name, metadata, files)

    def shards(self, name: str) -> list[np.ndarray]:
        """Array `name` as the list of its files' arrays, in order: one, mostly."""
        array = self.array(name)
        return array.shards if isinstance(array, ShardedArray) else [array]

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of array `name`, without mapping it."""
        return self._metadata(name).shape

    @contextmanager
    def understanding(self, group: str) -> Iterator[None]:
        """Within, what a stage recorded is taken apart: what it lacks, or has of another type, is damage.

        Raises
        ------
        IndexDamaged      for the errors that a missing entry, a wrong type or a wrong shape raises
        """
        try:
            yield
        except IndexFormatError:
            raise
        except (AttributeError, ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
            said = str(error).partition("\n")[0]
            raise IndexDamaged(
                f"{group} of index {self.path} are not what {STAGE_COMMANDS[group]} writes "
                f"({type(error).__name__}: {said})",
                fix=self._stage_fix(group, " --overwrite" if group == "operators" else ""),
            ) from error

    def group_attributes(self, group: str) -> dict[str, Any]:
        """What the stage recorded with its group; StageMissing when it has not been run."""
        return json.loads(json.dumps(self._stage(group).attributes))

    def chunk_tokens(self, chunk: int) -> np.ndarray:
        """Token ids of a chunk: (its length,) uint16 or uint32."""
        self._check_number("chunk", chunk, self.n_chunks)
        first, last = self._pair("corpus/chunk_offsets", chunk)
        return np.asarray(self._view("corpus/tokens")[first:last])

    def group_digest(self, group: str) -> str:
        """Digest of a stage's manifest: changes with any content of it; StageMissing when it has not been
        run."""
        return self._stage(group).digest

    def document_id(self, document: int) -> str:
        """The id that the corpus gave document number `document`."""
        self._check_number("document", document, self.n_documents)
        return self._text("corpus/document_id", document)

    def document_text(self, document: int) -> str | None:
        """The text of a document; None where the index was built without texts."""
        self._check_number("document", document, self.n_documents)
        return self._text("corpus/text", document) if self.has("corpus/text_bytes") else None

    def document_chunks(self, document: int) -> range:
        """The chunks of a document."""
        self._check_number("document", document, self.n_documents)
        return range(*self._pair("corpus/document_offsets", document))

    def chunk_documents(self, chunks: np.ndarray) -> np.ndarray:
        """The documents that `chunks` (any shape, integers) belong to: the same shape, int64."""
        return np.asarray(self._view("corpus/chunk_document")[np.asarray(chunks)])

    def check_bounds(self) -> None:
        """Whether numbers that point into other arrays stay inside them: what follows them does not look.

        One pass over the offsets, the documents of chunks and the design. Digests guard against damage; a
        maker of indexes who means harm writes digests too.

        Raises
        ------
        IndexDamaged      with the array that points outside
        """
        ends = offset_ends(self) | {"design/row_offsets": self.n_chunks * self.degree}
        for name, end in ends.items():
            if wrong := offsets_wrong(self.array(name), end):
                raise self._pointing_outside(name, wrong)
        limits = {
            "corpus/chunk_document": self.n_documents,
            "design/columns": self.n_subsets,
            "design/row_members": self.n_chunks,
        }
        for name, limit in limits.items():
            if not self.has(name):  # design/row_members of a large index
                continue
            numbers = self.array(name)
            for first, stop in ranges(len(numbers)):
                block = numbers[first:stop]
                if block.size and not (block.min() >= 0 and block.max() < limit):
                    raise self._pointing_outside(name, f"should be 0 … {limit - 1}")

    def _pointing_outside(self, name: str, wrong: str) -> IndexDamaged:
        return IndexDamaged(
            f"index {self.path}: {name} points outside ({wrong})",
            fix=f"stride index verify {self.path} says where; no build of stride writes that",
        )

    def check_fingerprint(self, kind: str, found: str) -> None:
        """Compare the fingerprint of a model, tokenizer or corpus with the one the index was built from.

        Raises
        ------
        IndexMismatch      with both fingerprints
        ValueError         the index records no fingerprint of this kind
        """
        fingerprints = self.attributes["fingerprints"]
        if kind not in fingerprints:
            raise ValueError(
                f"the index has fingerprints of {', '.join(sorted(fingerprints))}, not of {kind!r}"
            )
        expected = fingerprints[kind]
        if found != expected:
            raise IndexMismatch(
                f"index {self.path} was built for {kind} {expected}, this {kind} is {found}",
                fix=f"give the {kind} the index was built with (stride index info {self.path}), "
                "or build a new index",
            )

    # ---- inside ----

    def _stage(self, group: str) -> Group:
        if group not in STAGE_GROUPS:
            raise ValueError(f"stages keep {', '.join(STAGE_GROUPS)}, found {group!r}")
        if group not in self._stages:
            if not self._place.has_group(group):
                raise StageMissing(
                    f"index {self.path} has no {group} yet",
                    fix=self._stage_fix(group),
                )
            self._stages[group] = read_stage(self._place, group)
        return self._stages[group]

    def _stage_fix(self, group: str, how: str = "") -> str:
        """What makes a stage's group."""
        if isinstance(self._place, Directory):
            return f"{stage_command(group, self.path)}{how}"
        return f"{STAGE_COMMANDS[group]} on the directory that this is a copy of{how}, and copy it again"

    def _metadata(self, name: str) -> ArrayMetadata:
        group = name.partition("/")[0]
        arrays = self._stage(group).arrays if group in STAGE_GROUPS else self._root.arrays
        if name not in arrays:
            if group in STAGE_GROUPS:
                fix = self._stage_fix(group, ", with settings that keep it")
            else:
                fix = "build the index again with settings that keep it"
            raise StageMissing(f"index {self.path} has no array {name}", fix=fix)
        return arrays[name]

    def _view(self, name: str) -> Any:
        """The array without np.memmap's slow slicing, kept: single rows are read often."""
        if name not in self._views:
            array = self.array(name)
            self._views[name] = array.view(np.ndarray) if isinstance(array, np.ndarray) else array
        return self._views[name]

    def _pair(self, offsets: str, row: int) -> tuple[int, int]:
        first, last = self._view(offsets)[row : row + 2].tolist()
        return first, last

    def _text(self, prefix: str, document: int) -> str:
        first, last = self._pair(f"{prefix}_offsets", document)
        try:
            return bytes(self._view(f"{prefix}_bytes")[first:last]).decode()
        except UnicodeDecodeError:
            raise IndexDamaged(
                f"index {self.path}: {prefix} of document {document} is no UTF-8", fix=RESTORE
            ) from None

    @staticmethod
    def _check_number(what: str, number: int, count: int) -> None:
        if not 0 <= number < count:
            raise IndexError(f"{what} {number} of an index with {what}s 0 … {count - 1}")
