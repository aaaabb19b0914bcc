"""The arrays and attributes of an index, by name. SPEC.md has the same tables; a test compares them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

FORMAT_VERSION = 3
READABLE_VERSIONS = (1, 2, 3)  # 1 and 2: earlier releases, which may hold design/row_members
SHARD_BYTES = 256 << 20
ROOT_GROUPS = ("corpus", "design")  # under the root's manifest, written once
STAGE_GROUPS = ("operators", "truth", "calibration", "run")  # each with its own manifest, replaced as a whole
NUMBERS = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64"),
)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """One array (or, where the path ends in ``*``, a family of arrays) of the index.

    Attributes
    ----------
    path : str              group/name
    dtypes : tuple          the NumPy dtypes it may have; on disk always little-endian
    shape : tuple           sizes: integers, or expressions in n, T, D, K, d, I, X, Y; ("...",) = any shape
    required : bool         whether every index (or every group of this kind) has it
    meaning : str
    derived : bool          computed from other arrays, hence not taken over by an append
    """

    path: str
    dtypes: tuple[str, ...]
    shape: tuple[str | int, ...]
    required: bool
    meaning: str
    derived: bool = False


@dataclass(frozen=True, slots=True)
class AttributeSpec:
    """One attribute under the key "stride" of the root's zarr.json."""

    types: tuple[type, ...]
    required: bool
    meaning: str


_ANY = ("...",)
# Sizes: n chunks, T tokens, D documents, K subsets, d of a chunk, I bytes of ids, X of text, Y of titles
# fmt: off
_SPECS = (
    ArraySpec("corpus/tokens", ("uint16", "uint32"), ("T",), True, "token ids, chunk after chunk"),
    ArraySpec("corpus/chunk_offsets", ("int64",), ("n+1",), True,
        "chunk i is tokens[chunk_offsets[i] : chunk_offsets[i+1]]"),
    ArraySpec("corpus/chunk_document", ("int64",), ("n",), True, "the document of chunk i"),
    ArraySpec("corpus/loss_start", ("int32",), ("n",), True,
        "first scored position in chunk i, at least 1; the chunk's length when none is scored"),
    ArraySpec("corpus/loss_mask", ("uint8",), ("T",), False,
        "1 where a token is scored, 0 where not; only where loss_start alone cannot say it"),
    ArraySpec("corpus/document_offsets", ("int64",), ("D+1",), True,
        "document j is chunks document_offsets[j] … document_offsets[j+1]-1"),
    ArraySpec("corpus/document_id_bytes", ("uint8",), ("I",), True, "UTF-8 of all document ids, joined"),
    ArraySpec("corpus/document_id_offsets", ("int64",), ("D+1",), True,
        "id of document j is document_id_bytes[document_id_offsets[j] : document_id_offsets[j+1]]"),
    ArraySpec("corpus/title_bytes", ("uint8",), ("Y",), False, "UTF-8 of documents' titles; empty: none"),
    ArraySpec("corpus/title_offsets", ("int64",), ("D+1",), False, "as document_id_offsets; both or neither"),
    ArraySpec("corpus/text_bytes", ("uint8",), ("X",), False, "UTF-8 of all documents' texts, joined"),
    ArraySpec("corpus/text_offsets", ("int64",), ("D+1",), False, "as document_id_offsets; both or neither"),
    ArraySpec("design/columns", ("uint16", "uint32"), ("n", "d"), True,
        "the subsets of chunk i, ascending, distinct, below K; uint32 where K > 65536"),
    ArraySpec("design/row_offsets", ("int64",), ("K+1",), True,
        "subset k has row_offsets[k+1] - row_offsets[k] chunks", derived=True),
    ArraySpec("design/row_members", ("uint32", "uint64"), ("n*d",), False,
        "the chunks of each subset, ascending; of versions 1 and 2, not read", derived=True),
    ArraySpec("operators/seen", ("uint8",), _ANY, False,
        "1 where fitting used chunk i; chunks beyond its end were appended later"),
    ArraySpec("operators/before", ("uint8",), _ANY, False,
        "1 − p of each token by the model before its training, as 2^(−code/8)"),
    ArraySpec("operators/projection_codes", ("uint8",), _ANY, False,
        "row i: signs of a random projection of chunk i's gate gradient, a bit each, the highest first"),
    ArraySpec("operators/projection_step", ("float32",), _ANY, False, "size that these signs stand for"),
    ArraySpec("operators/projection_common", ("float32",), _ANY, False,
        "row i: chunk i in the directions that many chunks have in common, orthonormal columns"),
    ArraySpec("operators/projection_common_values", ("float64",), _ANY, False,
        "roughly how many chunks share each of these directions; descending"),
    ArraySpec("operators/training_log_*", ("float64",), _ANY, False, "a curve of the fit, by step"),
    ArraySpec("operators/checkpoint_*", NUMBERS, _ANY, False,
        "checkpoint_i.name: as operators/name, of entry i (from 1) of the group's attribute checkpoints"),
    ArraySpec("operators/*", NUMBERS, _ANY, False, "operators: U, gates, …; *_codes: float8 (times *_scale)"),
    ArraySpec("truth/*", NUMBERS, _ANY, False, "retrained-subset masks and losses"),
    ArraySpec("calibration/*", NUMBERS, _ANY, False,
        "null prompts: losses of their responses' first tokens, NaN behind the end; share of the strongest "
        "document; whether that has the prompt's words; near misses"),
    ArraySpec("run/*", NUMBERS, _ANY, False, "written by earlier versions for recorded trainings; not read"),
)
# fmt: on
ARRAYS: dict[str, ArraySpec] = {spec.path: spec for spec in _SPECS}

ATTRIBUTES: dict[str, AttributeSpec] = {
    "format_version": AttributeSpec((int,), True, f"{FORMAT_VERSION}; written by the writer"),
    "build_key": AttributeSpec((str,), True, "digest of what determined the build; written by the writer"),
    "shard_bytes": AttributeSpec((int,), True, "largest chunk file, in bytes; written by the writer"),
    "seed": AttributeSpec((int,), True, "seed of the design"),
    "n_subsets": AttributeSpec((int,), True, "K"),
    "degree": AttributeSpec((int,), True, "d"),
    "design": AttributeSpec((str,), True, 'kind of design: "regular"'),
    "block_size": AttributeSpec((int,), True, "largest number of tokens of a chunk"),
    "fingerprints": AttributeSpec((dict,), True, "SHA-256 of corpus, tokenizer, model, settings, form"),
    "model_path": AttributeSpec((str, type(None)), False, "hub id of the model, or its path from the index"),
    "config": AttributeSpec((dict,), False, "the configuration that built the index"),
    "counts": AttributeSpec((dict,), False, "counts of the build (documents read, skipped, …)"),
    "form": AttributeSpec((dict,), False, "how prompts and responses, or messages, became text"),
    "created_by": AttributeSpec((str,), False, "name and version of the program"),
}


def partial_path(path: Path) -> Path:
    """Return where the build of `path` is made: PATH.partial."""
    return path.with_name(path.name + ".partial")


def find_spec(name: str) -> ArraySpec:
    """Find the specification of array `name` ("group/array").

    Raises
    ------
    ValueError      the layout has no such array
    """
    if name in ARRAYS and "*" not in name:
        return ARRAYS[name]
    group, _, leaf = name.partition("/")
    if leaf and leaf not in ("zarr.json", "manifest.json") and _NAME.fullmatch(leaf):
        for pattern, spec in ARRAYS.items():  # the narrower pattern comes first in the table
            if "*" in pattern and fnmatchcase(name, pattern):
                return spec
    known = ", ".join(path for path in ARRAYS if path.startswith(f"{group}/")) or ", ".join(ARRAYS)
    raise ValueError(f"the layout has no array {name!r}; it has {known}")


def check_attributes(attributes: Mapping[str, Any]) -> list[str]:
    """List what is wrong with the root's attributes, a line each."""
    wrong = []
    for name, spec in ATTRIBUTES.items():
        expected = " or ".join("null" if t is type(None) else t.__name__ for t in spec.types)
        if name not in attributes:
            if spec.required:
                wrong.append(f"attribute {name!r} is missing")
        elif not isinstance(attributes[name], spec.types) or isinstance(attributes[name], bool):
            wrong.append(f"attribute {name!r} should be {expected}, found {attributes[name]!r}")
    return wrong


def check_arrays(
    shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, str], *, n_subsets: int, degree: int
) -> list[str]:
    """List what is wrong with the arrays of corpus/ and design/ taken together, a line each.

    Parameters
    ----------
    shapes, dtypes : of every array present, by name
    n_subsets, degree : int    of the attributes
    """
    wrong = [
        f"array {name} is missing"
        for name, spec in ARRAYS.items()
        if spec.required and name not in shapes and "*" not in name
    ]
    for name in ("corpus/title", "corpus/text"):
        if (f"{name}_bytes" in shapes) != (f"{name}_offsets" in shapes):
            wrong.append(f"{name}_bytes and {name}_offsets must both be present or both be absent")
    if wrong:
        return wrong
    sizes = {
        "n": shapes["corpus/chunk_offsets"][0] - 1,
        "T": shapes["corpus/tokens"][0],
        "D": shapes["corpus/document_offsets"][0] - 1,
        "K": n_subsets,
        "d": degree,
        "I": shapes["corpus/document_id_bytes"][0],
        "X": shapes.get("corpus/text_bytes", (0,))[0],
        "Y": shapes.get("corpus/title_bytes", (0,))[0],
    }
    for name, shape in shapes.items():
        spec = find_spec(name)
        if dtypes[name] not in spec.dtypes:
            wrong.append(f"{name} should be {' or '.join(spec.dtypes)}, found {dtypes[name]}")
        if spec.shape != _ANY:
            expected = tuple(_evaluate(size, sizes) for size in spec.shape)
            if shape != expected:
                terms = ", ".join(str(size) for size in spec.shape)
                wrong.append(f"{name} should have shape ({terms}) = {expected}, found {shape}")
    return wrong


def _evaluate(size: str | int, sizes: Mapping[str, int]) -> int:
    """Evaluate a size of the table: an integer, a letter, "x+1" or "x*y"."""
    if isinstance(size, int):
        return size
    if "*" in size:
        left, right = size.split("*")
        return sizes[left] * sizes[right]
    letter, _, plus = size.partition("+")
    return sizes[letter] + int(plus or 0)
