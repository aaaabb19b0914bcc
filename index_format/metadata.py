"""zarr.json: the Zarr v3 metadata of groups and arrays, in canonical bytes.

Any Zarr reader opens them; zarr itself is not needed here. Only documents that STRIDE writes are accepted:
then dtype, byte order and chunks are known to be what a memory map needs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from index_format.layout import NUMBERS

ZARR_JSON = "zarr.json"
ATTRIBUTES_KEY = "stride"
MOST_AXES = 8
MOST_VALUES = 1 << 56  # so that their bytes can be counted in 64 bits


@dataclass(frozen=True, slots=True)
class ArrayMetadata:
    """Shape, NumPy dtype name and rows per chunk file of one array."""

    shape: tuple[int, ...]
    dtype: str
    chunk_rows: int

    @property
    def n_files(self) -> int:
        """Number of chunk files; 0 for an array without rows."""
        return -(-self.shape[0] // self.chunk_rows)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return np.dtype(self.dtype).itemsize * math.prod(self.shape[1:])

    def file_rows(self, file: int) -> tuple[int, int]:
        """Rows (first, last + 1) that chunk file `file` holds."""
        return file * self.chunk_rows, min((file + 1) * self.chunk_rows, self.shape[0])


def encode_json(value: Any) -> bytes:
    """Encode a JSON value in canonical bytes: sorted keys, ASCII, one space of indent; ValueError for NaN."""
    return (json.dumps(value, sort_keys=True, indent=1, allow_nan=False) + "\n").encode("ascii")


def decode_json(data: bytes) -> Any:
    """Decode JSON; ValueError for anything else."""
    try:
        return json.loads(data)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def group_json(attributes: Mapping[str, Any] | None = None) -> bytes:
    """Encode the zarr.json of a group; `attributes` go under the key "stride"."""
    kept = {} if attributes is None else {ATTRIBUTES_KEY: dict(attributes)}
    return encode_json({"attributes": kept, "node_type": "group", "zarr_format": 3})


def array_json(metadata: ArrayMetadata) -> bytes:
    """Encode the zarr.json of an array: little-endian bytes, no compression, chunked along the first axis."""
    dtype = np.dtype(metadata.dtype)
    endian = {"configuration": {"endian": "little"}} if dtype.itemsize > 1 else {}
    chunk_shape = [metadata.chunk_rows, *metadata.shape[1:]]
    return encode_json(
        {
            "attributes": {},
            "chunk_grid": {"configuration": {"chunk_shape": chunk_shape}, "name": "regular"},
            "chunk_key_encoding": {"configuration": {"separator": "/"}, "name": "default"},
            "codecs": [{**endian, "name": "bytes"}],
            "data_type": metadata.dtype,
            "fill_value": dtype.type(0).item(),
            "node_type": "array",
            "shape": list(metadata.shape),
            "zarr_format": 3,
        }
    )


def parse_group(document: bytes) -> dict[str, Any]:
    """Return a group's attributes under the key "stride", {} where it has none.

    Raises
    ------
    ValueError      the document is no zarr.json of a group
    """
    content = decode_json(document)
    if not isinstance(content, dict) or content.get("node_type") != "group":
        raise ValueError("not a Zarr group")
    attributes = content.get("attributes", {})
    kept = attributes.get(ATTRIBUTES_KEY, {}) if isinstance(attributes, dict) else None
    if not isinstance(kept, dict):
        raise ValueError(f"attribute {ATTRIBUTES_KEY!r} should be an object")
    return kept


@lru_cache(maxsize=1024)  # many arrays have the same document, and many commands open an index twice
def parse_array(document: bytes) -> ArrayMetadata | None:
    """Return what a zarr.json says of an array; None where it describes a group.

    Raises
    ------
    ValueError      it is neither a group nor an array as STRIDE writes it
    """
    content = decode_json(document)
    if not isinstance(content, dict):
        raise ValueError("not a Zarr node")
    if content.get("node_type") != "array":
        return None
    try:
        shape, rows = content["shape"], content["chunk_grid"]["configuration"]["chunk_shape"][0]
        found = ArrayMetadata(tuple(shape), content["data_type"], rows)
        n_rows = max(1, shape[0])  # chunks of an array without rows have one
        fits = (
            found.dtype in NUMBERS
            and len(shape) <= MOST_AXES
            and all(type(size) is int and size >= 0 for size in (*shape, rows))
            and 0 < math.prod((n_rows, *shape[1:])) <= MOST_VALUES  # before anything is made of them
            and 0 < rows <= n_rows
        )
    except (LookupError, TypeError):
        fits = False
    if not fits or document != array_json(found):
        raise ValueError("not an array that STRIDE writes")
    return found


def chunk_name(file: int, n_axes: int) -> str:
    """Name of chunk file number `file` below its array: c/0, or c/0/0 for two axes, …"""
    return f"c/{file}" + "/0" * (n_axes - 1)


def chunk_file(array: Path, file: int, n_axes: int) -> Path:
    """Path of chunk file number `file` of the array in directory `array`."""
    return array / chunk_name(file, n_axes)


def rows_per_file(row_bytes: int, shard_bytes: int) -> int:
    """Most rows of one chunk file; one where a row alone is larger than `shard_bytes`."""
    return max(1, shard_bytes // row_bytes)
