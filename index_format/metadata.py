"""zarr.json: the Zarr v3 metadata of groups and arrays, made and understood by zarr-python.

What zarr-python makes is kept in canonical bytes, without members that only say that there is nothing: no
digest depends on its version. Importing zarr takes a quarter second: a document that is what it makes for us,
byte for byte, is understood without it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from index_format.layout import NUMBERS

ZARR_JSON = "zarr.json"
ATTRIBUTES_KEY = "stride"
MOST_AXES = 8
MOST_VALUES = 1 << 56  # bytes of them are counted in 64 bits
# what zarr-python raises at a document that is none
_NOT_ZARR = (ArithmeticError, AttributeError, LookupError, NotImplementedError, TypeError, ValueError)


@dataclass(frozen=True, slots=True)
class ArrayMetadata:
    """What a zarr.json says of an array: shape, NumPy dtype name, rows in one chunk file."""

    shape: tuple[int, ...]
    dtype: str
    chunk_rows: int

    @property
    def n_files(self) -> int:
        """How many chunk files hold it; an array without rows has none."""
        return -(-self.shape[0] // self.chunk_rows)

    def file_rows(self, file: int) -> tuple[int, int]:
        """The rows (first, last + 1) that chunk file `file` holds."""
        return file * self.chunk_rows, min((file + 1) * self.chunk_rows, self.shape[0])


def encode_json(value: Any) -> bytes:
    """The canonical bytes of a JSON value: sorted keys, ASCII, one space of indent; ValueError for NaN."""
    return (json.dumps(value, sort_keys=True, indent=1, allow_nan=False) + "\n").encode("ascii")


def decode_json(data: bytes) -> Any:
    """The inverse of `encode_json`; ValueError for whatever is no JSON."""
    try:
        return json.loads(data)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def group_json(attributes: Mapping[str, Any] | None = None) -> bytes:
    """zarr.json of a group; `attributes` are kept under the key "stride"."""
    import zarr
    from zarr.storage import MemoryStore

    written: dict[str, Any] = {}
    kept = {} if attributes is None else {ATTRIBUTES_KEY: dict(attributes)}
    zarr.create_group(MemoryStore(written), attributes=kept, zarr_format=3)
    return _canonical(written[ZARR_JSON])


def array_json(metadata: ArrayMetadata) -> bytes:
    """zarr.json of an array: little-endian bytes, no compression, chunked along the first axis only."""
    import zarr
    from zarr.codecs import BytesCodec
    from zarr.storage import MemoryStore

    dtype = np.dtype(metadata.dtype)
    fill: bool | int | float = False if dtype.kind == "b" else 0.0 if dtype.kind == "f" else 0
    written: dict[str, Any] = {}
    zarr.create_array(
        MemoryStore(written),
        shape=metadata.shape,
        chunks=(metadata.chunk_rows, *metadata.shape[1:]),
        dtype=dtype,
        filters=None,
        compressors=None,
        serializer=BytesCodec(endian="little" if dtype.itemsize > 1 else None),
        fill_value=fill,
        zarr_format=3,
    )
    return _canonical(written[ZARR_JSON])


def _canonical(document: Any) -> bytes:
    """A zarr.json that zarr-python wrote, in bytes that its content determines."""
    content = decode_json(document.to_bytes())
    for name in ("storage_transformers", "dimension_names", "consolidated_metadata"):
        if not content.get(name):
            content.pop(name, None)
    return encode_json(content)


@cache
def _nowhere() -> Any:
    """An empty place in memory, for nodes whose metadata alone are wanted."""
    from zarr.storage import MemoryStore, StorePath

    return StorePath(MemoryStore())


def parse_group(content: Mapping[str, Any]) -> dict[str, Any]:
    """A group's attributes under the key "stride", {} where it has none; ValueError for what is no group."""
    try:
        attributes = content.get("attributes")
        written = {"attributes": attributes, "node_type": "group", "zarr_format": 3}
        if content != written or type(content["zarr_format"]) is not int or not isinstance(attributes, dict):
            import zarr

            attributes = zarr.AsyncGroup.from_dict(_nowhere(), dict(content)).attrs
        kept = attributes.get(ATTRIBUTES_KEY, {})
    except _NOT_ZARR as error:
        raise ValueError(f"not a Zarr group: {error}") from error
    if not isinstance(kept, dict):
        raise ValueError(f"attribute {ATTRIBUTES_KEY!r} should be an object")
    return kept


@lru_cache(maxsize=1024)  # many arrays have the same document, and many commands open an index twice
def read_node(document: bytes) -> ArrayMetadata | None:
    """What a zarr.json says of an array; None where it is a group's; errors as of decoding and parsing."""
    content = decode_json(document)
    if content["node_type"] != "array":
        return None
    return _as_written(document, content) or parse_array(content)


def _as_written(document: bytes, content: Mapping[str, Any]) -> ArrayMetadata | None:
    """The array that `array_json` has made this document of; None where it has not."""
    try:
        _check_sizes(content)
        shape, dtype = content["shape"], content["data_type"]
        rows = content["chunk_grid"]["configuration"]["chunk_shape"][0]
        if dtype not in NUMBERS or not 1 <= rows <= max(1, shape[0]):
            return None
        found = ArrayMetadata(tuple(shape), dtype, rows)
        return found if document == written_array(found) else None
    except (LookupError, TypeError, ValueError):
        return None


def written_array(metadata: ArrayMetadata) -> bytes:
    """What `array_json` gives, of a dtype of `NUMBERS`."""
    dtype = np.dtype(metadata.dtype)
    endian = {"configuration": {"endian": "little"}} if dtype.itemsize > 1 else {}
    return encode_json(
        {
            "attributes": {},
            "chunk_grid": {
                "configuration": {"chunk_shape": [metadata.chunk_rows, *metadata.shape[1:]]},
                "name": "regular",
            },
            "chunk_key_encoding": {"configuration": {"separator": "/"}, "name": "default"},
            "codecs": [{**endian, "name": "bytes"}],
            "data_type": metadata.dtype,
            "fill_value": dtype.type(0).item(),
            "node_type": "array",
            "shape": list(metadata.shape),
            "zarr_format": 3,
        }
    )


def parse_array(content: Mapping[str, Any]) -> ArrayMetadata:
    """The inverse of `array_json`; ValueError for a Zarr array that is not of the kind we write.

    What a memory map relies on is compared, nothing else: dtype, bytes in little-endian order and no other
    codec, chunks of whole rows, and their names.
    """
    import zarr
    from zarr.codecs import BytesCodec

    try:
        _check_sizes(content)
        read = zarr.Array.from_dict(_nowhere(), dict(content)).metadata
        shape, chunk, codecs = read.shape, read.chunk_grid.chunk_shape, read.codecs
        dtype = np.dtype(read.dtype.to_native_dtype())
        if dtype.name not in NUMBERS or not shape or not 1 <= chunk[0] <= max(1, shape[0]):
            raise ValueError("dtype, shape or chunk shape")
        if chunk[1:] != shape[1:]:
            raise ValueError("chunk grid")
        if len(codecs) != 1 or not isinstance(codecs[0], BytesCodec) or read.storage_transformers:
            raise ValueError("codecs")
        if dtype.itemsize > 1 and getattr(codecs[0].endian, "value", None) != "little":
            raise ValueError("byte order")
        if read.encode_chunk_key((3, *[0] * (len(shape) - 1))) != chunk_name(3, len(shape)):
            raise ValueError("names of chunk files")
    except _NOT_ZARR as error:
        raise ValueError(f"not an array that STRIDE writes: {error}") from error
    return ArrayMetadata(shape, dtype.name, chunk[0])


def _check_sizes(content: Mapping[str, Any]) -> None:
    """Shape and chunk shape, before anything is made of them: sizes that an array on a disk can have."""
    for sizes in (content["shape"], content["chunk_grid"]["configuration"]["chunk_shape"]):
        if not isinstance(sizes, list | tuple) or not 1 <= len(sizes) <= MOST_AXES:
            raise ValueError(f"shape: should have 1 to {MOST_AXES} axes")
        if any(type(size) is not int or size < 0 for size in sizes) or 0 in sizes[1:]:
            raise ValueError("shape: a size is no number, or below one")
        if math.prod(max(size, 1) for size in sizes) > MOST_VALUES:
            raise ValueError(f"shape: more than {MOST_VALUES:,} values")


def chunk_name(file: int, n_axes: int) -> str:
    """The name of chunk file number `file` below its array: c/0, or c/0/0 for two axes, …"""
    return f"c/{file}" + "/0" * (n_axes - 1)


def chunk_file(array: Path, file: int, n_axes: int) -> Path:
    """Chunk file number `file` of the array in directory `array`."""
    return array / chunk_name(file, n_axes)


def rows_per_file(row_bytes: int, shard_bytes: int) -> int:
    """How many rows one chunk file holds at most; one where a row alone is larger than `shard_bytes`."""
    return max(1, shard_bytes // row_bytes)
