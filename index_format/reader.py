"""Reading an index. Arrays are memory maps of files whose digests are compared; nothing is ever written."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from index_format.confined import is_sound
from index_format.errors import (
    RESTORE,
    IndexDamaged,
    IndexFormatError,
    IndexIncomplete,
    IndexMismatch,
    IndexNotFound,
    IndexReadOnly,
    IndexVersionError,
    StageMissing,
)
from index_format.layout import FORMAT_VERSION, READABLE_VERSIONS, STAGE_GROUPS, find_spec, partial_path
from index_format.location import Given, Location, is_elsewhere, local_directory, locate
from index_format.manifest import (
    MANIFEST,
    ZARR_JSON,
    ArrayMetadata,
    Group,
    check_contents,
    parse_group,
    read_document,
    read_group,
)
from index_format.shards import ShardedArray, map_array, ranges

Progress = Callable[[int, int], None]
STAGE_COMMANDS = {
    "operators": "stride train",
    "truth": "stride evaluate truth",
    "calibration": "stride calibrate",
}


class Index:
    """An index opened for reading.

    Attributes
    ----------
    path : Path or RemotePath      as it was given; files beside the index are beside `directory`
    attributes : mapping      layout.ATTRIBUTES, read-only
    n_chunks, n_documents, n_tokens, n_subsets, degree, seed : int
    digest : str              of the root's manifest: changes with any content of corpus/ or design/
    """

    def __init__(self, path: Location, root: Path, attributes: Mapping[str, Any], group: Group) -> None:
        self.path = path
        self._directory = root
        self.attributes = MappingProxyType(dict(attributes))
        self._root = group
        self._stages: dict[str, Group] = {}
        self._views: dict[str, np.ndarray | ShardedArray] = {}
        self.digest = group.digest
        self.n_subsets: int = attributes["n_subsets"]
        self.degree: int = attributes["degree"]
        self.seed: int = attributes["seed"]
        self.n_chunks = group.arrays["corpus/chunk_offsets"].shape[0] - 1
        self.n_documents = group.arrays["corpus/document_offsets"].shape[0] - 1
        self.n_tokens = group.arrays["corpus/tokens"].shape[0]

    def __repr__(self) -> str:
        return f"Index({str(self.path)!r}, {self.n_documents:,} documents, {self.n_chunks:,} chunks)"

    @classmethod
    def open(cls, path: Given, *, progress: Progress | None = None) -> Index:
        """Open the index at `path`: a directory; or a zip file or a URL, which is fetched to the cache first.

        Compared: the format version; the manifest with its own digest; the length of every file and the
        content of every zarr.json with the manifest; every array of layout.ARRAYS with its dtype and shape.
        A chunk file is compared with its SHA-256 when something of it is first read, unless that was done
        since it last changed (`index_format.confined`). A stage's group (operators, truth) is checked in the
        same way when it is first asked for, so that a damaged one can be fitted again.

        Parameters
        ----------
        path : path or URL (``https://…``, ``s3://…``, whatever fsspec reads)
        progress : callable      called with (bytes here, bytes in all) as an index elsewhere is fetched

        Raises
        ------
        IndexNotFound, IndexIncomplete, IndexVersionError, IndexDamaged
        IndexUnreachable, ExtraMissing      (a URL) there is no answer; a package is not installed
        """
        where = _absolute(locate(path))
        root = local_copy(where, progress)
        attributes = _read_attributes(root)
        group = read_group(root, "")
        wrong = check_contents(attributes, group.arrays)
        if wrong:
            raise IndexDamaged(f"{where}: {'; '.join(wrong)}", fix=RESTORE)
        return cls(where, root, attributes, group)

    @property
    def directory(self) -> Path:
        """The index's directory, for files written in it or beside it; IndexReadOnly where it was fetched."""
        if self.path != self._directory:
            local_directory(self.path)
            raise IndexReadOnly(
                f"index {self.path} cannot be written", fix="copy it to a local directory first"
            )
        return self._directory

    @property
    def n_bytes(self) -> int:
        """Length of all files that the manifests list, of the index and of its stages."""
        groups = [self._root, *(self._stage(group) for group in STAGE_GROUPS if self.has(group))]
        return sum(length for group in groups for length, _ in group.files.values())

    @property
    def fitted_share(self) -> float:
        """Share of the chunks that existed when the operators were fitted; the others were appended."""
        return float(self.shape("operators/seen")[0] / max(1, self.n_chunks))

    # ---- groups and arrays ----

    def has(self, name: str) -> bool:
        """Check for a group ("operators") or an array ("operators/gates", "corpus/text_bytes")."""
        group, _, leaf = name.partition("/")
        if group in STAGE_GROUPS:
            if not (self._directory / group).is_dir():
                return False
            return not leaf or name in self._stage(group).arrays
        return name in self._root.arrays or name in ("corpus", "design")

    def names(self, group: str) -> list[str]:
        """List the arrays of a group, sorted; StageMissing when its stage has not been run."""
        return sorted(name for name in self._group(group).arrays if name.startswith(f"{group}/"))

    def array(self, name: str) -> np.ndarray | ShardedArray:
        """Map array `name` ("group/array"), read-only.

        A single file is compared with its digest now, several when they are first read.

        Returns
        -------
        np.memmap (an empty plain array where there are no rows), or ShardedArray where several files hold it

        Raises
        ------
        StageMissing      the stage has not been run, or the optional array was left out
        IndexDamaged      a file is not what was written (of several: when it is read)
        ValueError        the layout has no such array
        """
        find_spec(name)
        metadata = self._metadata(name)
        files = self._group(group := name.partition("/")[0]).files

        def check(chunk: str, opened: os.stat_result, content: memoryview) -> None:
            if not is_sound(opened, content, files[chunk][1]):
                other = f"{self._directory / chunk} has other content than the manifest records"
                raise IndexDamaged(other, fix=self._remedy(group))

        return map_array(self._directory, name, metadata, check)

    def shards(self, name: str) -> list[np.ndarray]:
        """Map array `name` as the list of its files' arrays, in order: one, mostly."""
        array = self.array(name)
        return array.shards if isinstance(array, ShardedArray) else [array]

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of array `name`, without mapping it."""
        return self._metadata(name).shape

    def group_attributes(self, group: str) -> dict[str, Any]:
        """Copy the attributes that a stage recorded; StageMissing when it has not been run."""
        return json.loads(json.dumps(self._stage(group).attributes))

    def group_digest(self, group: str) -> str:
        """Digest of a stage's manifest: changes with any content of it."""
        return self._stage(group).digest

    @contextmanager
    def understanding(self, group: str) -> Iterator[None]:
        """Report a missing entry, or one of a wrong type or shape, in a stage's records as damage.

        Raises
        ------
        IndexDamaged      in place of the errors that taking such records apart raises
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

    # ---- chunks and documents ----

    def chunk_tokens(self, chunk: int) -> np.ndarray:
        """Token ids of a chunk: (its length,) uint16 or uint32."""
        self._check_number("chunk", chunk, self.n_chunks)
        first, last = self._pair("corpus/chunk_offsets", chunk)
        return np.asarray(self._view("corpus/tokens")[first:last])

    def document_id(self, document: int) -> str:
        """The id that the corpus gave document number `document`."""
        return self._text("corpus/document_id", document)

    def document_title(self, document: int) -> str:
        """The title that the corpus gave document number `document`; "": none, or it is the id."""
        return self._text("corpus/title", document) if self.has("corpus/title_bytes") else ""

    def document_text(self, document: int) -> str | None:
        """The text of a document; None where the index was built without texts."""
        return self._text("corpus/text", document) if self.has("corpus/text_bytes") else None

    def document_chunks(self, document: int) -> range:
        """The chunks of a document."""
        self._check_number("document", document, self.n_documents)
        return range(*self._pair("corpus/document_offsets", document))

    def chunk_documents(self, chunks: np.ndarray) -> np.ndarray:
        """The documents that `chunks` (any shape, integers) belong to: the same shape, int64."""
        return np.asarray(self._view("corpus/chunk_document")[np.asarray(chunks)])

    # ---- checks ----

    def check_bounds(self) -> None:
        """Refuse numbers that point outside the arrays they index: code that follows them does not look.

        One pass over the offsets, the documents of chunks and the design. Digests guard against damage; a
        hostile maker of indexes writes digests too.

        Raises
        ------
        IndexDamaged      with the array that points outside
        """
        for name, end in {**offset_ends(self), "design/row_offsets": self.n_chunks * self.degree}.items():
            if wrong := offsets_wrong(self.array(name), end):
                raise self._pointing_outside(name, wrong)
        limits = {"corpus/chunk_document": self.n_documents, "design/columns": self.n_subsets}
        for name, limit in limits.items():
            numbers = self.array(name)
            for first, stop in ranges(len(numbers)):
                block = numbers[first:stop]
                if block.size and not (block.min() >= 0 and block.max() < limit):
                    raise self._pointing_outside(name, f"should be 0 … {limit - 1}")

    def check_fingerprint(self, kind: str, found: str) -> None:
        """Compare the fingerprint of a model, tokenizer or corpus with the one the index was built from.

        Raises
        ------
        IndexMismatch      with both fingerprints
        ValueError         the index records no fingerprint of this kind
        """
        fingerprints = self.attributes["fingerprints"]
        if kind not in fingerprints:
            raise ValueError(f"the index has no fingerprint of {kind!r}")
        expected = fingerprints[kind]
        if found != expected:
            raise IndexMismatch(
                f"index {self.path} was built for {kind} {expected}, this {kind} is {found}",
                fix=f"give the {kind} the index was built with (stride index info {self.path}), "
                "or build a new index",
            )

    # ---- inside ----

    def _group(self, group: str) -> Group:
        return self._stage(group) if group in STAGE_GROUPS else self._root

    def _stage(self, group: str) -> Group:
        if group not in STAGE_GROUPS:
            raise ValueError(f"stages keep {', '.join(STAGE_GROUPS)}, found {group!r}")
        if group not in self._stages:
            if not (self._directory / group).is_dir():
                raise StageMissing(f"index {self.path} has no {group} yet", fix=self._stage_fix(group))
            try:
                self._stages[group] = read_group(self._directory, f"{group}/")
            except IndexDamaged as error:
                if self.path != self._directory:
                    raise
                raise IndexDamaged(error.message, fix=self._remedy(group)) from None
        return self._stages[group]

    def _remedy(self, group: str) -> str:
        """Return what makes a damaged group whole: its stage, or a copy."""
        if group not in STAGE_GROUPS or self.path != self._directory:
            return RESTORE
        anew = " --overwrite" if group in ("operators", "truth") else ""  # a calibration is replaced without
        return f"{self._stage_fix(group, anew)} makes it again"

    def _stage_fix(self, group: str, how: str = "") -> str:
        """Return the command that makes a stage's group."""
        command = STAGE_COMMANDS.get(group, "stride index build --from-run RUN")
        if self.path != self._directory:
            return f"{command} on the directory that this is a copy of{how}, and copy it again"
        return f"{command} --index {self.path}{how}"

    def _metadata(self, name: str) -> ArrayMetadata:
        group = name.partition("/")[0]
        arrays = self._group(group).arrays
        if name not in arrays:
            fix = "build the index again with settings that keep it"
            if group in STAGE_GROUPS:
                fix = self._stage_fix(group, ", with settings that keep it")
            raise StageMissing(f"index {self.path} has no array {name}", fix=fix)
        return arrays[name]

    def _pointing_outside(self, name: str, wrong: str) -> IndexDamaged:
        return IndexDamaged(
            f"index {self.path}: {name} points outside ({wrong})",
            fix=f"stride index verify {self.path} says where; no build of stride writes that",
        )

    def _view(self, name: str) -> Any:
        """Keep the array without np.memmap's slow slicing: single rows are read often."""
        if name not in self._views:
            array = self.array(name)
            self._views[name] = array.view(np.ndarray) if isinstance(array, np.ndarray) else array
        return self._views[name]

    def _pair(self, offsets: str, row: int) -> tuple[int, int]:
        first, last = self._view(offsets)[row : row + 2].tolist()
        return first, last

    def _text(self, prefix: str, document: int) -> str:
        self._check_number("document", document, self.n_documents)
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


def local_copy(where: Location, progress: Progress | None = None) -> Path:
    """Return the absolute directory of an index; one at a URL or in a zip file is fetched to the cache.

    Raises
    ------
    what `index_format.remote.fetch_index` raises
    """
    if is_elsewhere(where):
        from index_format.remote import fetch_index

        return fetch_index(where, progress)
    return Path(str(_absolute(where)))


def _absolute(where: Location) -> Location:
    # resolve() would follow links
    return Path(os.path.abspath(where)) if isinstance(where, Path) else where  # noqa: PTH100


def offset_ends(index: Index) -> dict[str, int]:
    """Return the offsets of corpus/ by name, with the number that each of them ends at."""
    ends = {
        "corpus/chunk_offsets": index.n_tokens,
        "corpus/document_offsets": index.n_chunks,
        "corpus/document_id_offsets": index.shape("corpus/document_id_bytes")[0],
    }
    for name in ("corpus/title", "corpus/text"):
        if index.has(f"{name}_offsets"):
            ends[f"{name}_offsets"] = index.shape(f"{name}_bytes")[0]
    return ends


def offsets_wrong(offsets: np.ndarray | ShardedArray, last: int) -> str:
    """Say how offsets that should rise from 0 to `last` do not; "" when they do."""
    if offsets[0] != 0 or offsets[-1] != last:
        return f"should go from 0 to {last}, go from {offsets[0]} to {offsets[-1]}"
    for first, end in ranges(len(offsets) - 1):
        if wrong := first_bad(first, np.diff(offsets[first : end + 1]) < 0, "fall after entry {}"):
            return wrong
    return ""


def first_bad(offset: int, bad: Any, message: str) -> str:
    """Put the number of the first bad row into `message`; "" when none is bad."""
    return message.format(offset + int(np.argmax(bad))) if bad.any() else ""


def _read_attributes(root: Path) -> dict[str, Any]:
    """Read the root's attributes; refuse what is no index of a version that this release reads."""
    document = read_document(root, ZARR_JSON)
    if document is None:
        raise _not_there(root)
    try:
        attributes = parse_group(document)
    except ValueError:
        attributes = {}
    if "format_version" not in attributes:
        if read_document(root, MANIFEST) is not None:
            raise IndexDamaged(f"{root / ZARR_JSON} has no format version", fix=RESTORE)
        raise IndexNotFound(f"{root} is no STRIDE index", fix="stride index build makes one")
    version = attributes["format_version"]
    if version not in READABLE_VERSIONS:
        raise IndexVersionError(
            f"index {root} has format version {version!r}, this release reads 1 to {FORMAT_VERSION}",
            fix="use the release that built it, or build it again",
        )
    return attributes


def _not_there(root: Path) -> IndexFormatError:
    """Say what is at a path without a zarr.json."""
    if partial_path(root).is_dir() and not root.exists():
        return IndexIncomplete(
            f"the build of {root} has not finished", fix="rerun the command that began it; it resumes"
        )
    if read_document(root, MANIFEST) is not None:
        return IndexDamaged(f"{root / ZARR_JSON} is missing", fix=RESTORE)
    said = "is no index" if root.exists() else "does not exist"
    return IndexNotFound(f"{root} {said}", fix="stride index build makes one")
