"""Reading an index: opening validates it, arrays are memory-mapped, nothing is ever written."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from index_format.errors import IndexDamaged, IndexMismatch, StageMissing
from index_format.group import REBUILD, STAGE_COMMANDS, Group, read_attributes, read_group, read_stage
from index_format.layout import STAGE_GROUPS, check_arrays, check_attributes, find_spec
from index_format.metadata import ArrayMetadata
from index_format.shards import ShardedArray, map_array


class Index:
    """An index opened for reading.

    Attributes
    ----------
    path : Path
    attributes : mapping      layout.ATTRIBUTES, read-only
    n_chunks, n_documents, n_tokens, n_subsets, degree, seed : int
    digest : str              of the root's manifest: changes with any content of corpus/ or design/
    """

    def __init__(self, path: Path, attributes: Mapping[str, Any], root: Group) -> None:
        self.path = path
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
    def open(cls, path: str | os.PathLike[str], *, check: bool = True) -> Index:
        """Open the index at `path`.

        Compared: the format version; the manifest with its own digest; the length of every file and the
        content of every zarr.json with the manifest; every array of layout.ARRAYS with its dtype and shape.
        The content of the chunk files is `verify`'s business. A stage's group (operators, truth) is checked
        in the same way when it is first asked for, so that a damaged one can be fitted again.

        Parameters
        ----------
        path : path
        check : bool      False leaves out the files' lengths and the digests of zarr.json

        Raises
        ------
        IndexNotFound, IndexIncomplete, IndexVersionError, IndexDamaged
        """
        path = Path(os.path.abspath(path))  # noqa: PTH100 (resolve() would follow links)
        attributes = read_attributes(path)
        root = read_group(path, "", check=check)
        wrong = check_attributes(attributes)
        if not wrong:
            shapes = {name: array.shape for name, array in root.arrays.items()}
            dtypes = {name: array.dtype for name, array in root.arrays.items()}
            wrong = check_arrays(
                shapes, dtypes, n_subsets=attributes["n_subsets"], degree=attributes["degree"]
            )
        if wrong:
            raise IndexDamaged(f"{path}: {'; '.join(wrong)}", fix=REBUILD)
        return cls(path, attributes, root)

    def has(self, name: str) -> bool:
        """Whether there is such a group ("operators") or array ("operators/gates", "corpus/text_bytes")."""
        group, _, leaf = name.partition("/")
        if group in STAGE_GROUPS:
            if not (self.path / group).is_dir():
                return False
            return not leaf or name in self._stage(group).arrays
        return name in self._root.arrays or name in ("corpus", "design")

    def names(self, group: str) -> list[str]:
        """The arrays of a group, sorted; StageMissing when its stage has not been run."""
        arrays = self._stage(group).arrays if group in STAGE_GROUPS else self._root.arrays
        return sorted(name for name in arrays if name.startswith(f"{group}/"))

    def array(self, name: str) -> np.ndarray | ShardedArray:
        """Array `name` ("group/array"), read-only, mapped rather than read.

        Returns
        -------
        np.memmap (an empty plain array where there are no rows), or ShardedArray where several files hold it

        Raises
        ------
        StageMissing      the stage has not been run, or the optional array was left out
        ValueError        the layout has no such array
        """
        find_spec(name)
        return map_array(self.path / name, self._metadata(name))

    def shards(self, name: str) -> list[np.ndarray]:
        """Array `name` as the list of its files' arrays, in order: one, mostly."""
        array = self.array(name)
        return array.shards if isinstance(array, ShardedArray) else [array]

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of array `name`, without mapping it."""
        return self._metadata(name).shape

    def group_attributes(self, group: str) -> dict[str, Any]:
        """What the stage recorded with its group; StageMissing when it has not been run."""
        return json.loads(json.dumps(self._stage(group).attributes))

    def group_digest(self, group: str) -> str:
        """The digest of a stage's manifest: changes with any content of the group."""
        return self._stage(group).digest

    def operator_attributes(self) -> dict[str, Any]:
        """`group_attributes("operators")`."""
        return self.group_attributes("operators")

    def chunk_tokens(self, chunk: int) -> np.ndarray:
        """Token ids of a chunk: (its length,) uint16 or uint32."""
        self._check_number("chunk", chunk, self.n_chunks)
        first, last = self._pair("corpus/chunk_offsets", chunk)
        return np.asarray(self._view("corpus/tokens")[first:last])

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
            raise ValueError(f"stages keep {' and '.join(STAGE_GROUPS)}, found {group!r}")
        if group not in self._stages:
            if not (self.path / group).is_dir():
                raise StageMissing(
                    f"index {self.path} has no {group} yet",
                    fix=f"{STAGE_COMMANDS[group]} --index {self.path}",
                )
            self._stages[group] = read_stage(self.path, group)
        return self._stages[group]

    def _metadata(self, name: str) -> ArrayMetadata:
        group = name.partition("/")[0]
        arrays = self._stage(group).arrays if group in STAGE_GROUPS else self._root.arrays
        if name not in arrays:
            if group in STAGE_GROUPS:
                fix = f"{STAGE_COMMANDS[group]} --index {self.path}, with settings that keep it"
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
        return bytes(self._view(f"{prefix}_bytes")[first:last]).decode()

    @staticmethod
    def _check_number(what: str, number: int, count: int) -> None:
        if not 0 <= number < count:
            raise IndexError(f"{what} {number} of an index with {what}s 0 … {count - 1}")
