"""zarr.json: the Zarr v3 metadata of groups and arrays, written and read by us."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from index_format.layout import NUMBERS

ZARR_JSON = "zarr.json"
ATTRIBUTES_KEY = "stride"


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
    kept = {} if attributes is None else {ATTRIBUTES_KEY: dict(attributes)}
    return encode_json({"attributes": kept, "node_type": "group", "zarr_format": 3})


def array_json(metadata: ArrayMetadata) -> bytes:
    """zarr.json of an array: little-endian bytes, no compression, chunked along the first axis only."""
    dtype = np.dtype(metadata.dtype)
    fill: bool | int | float = False if dtype.kind == "b" else 0.0 if dtype.kind == "f" else 0
    codec: dict[str, Any] = {"name": "bytes"}
    if dtype.itemsize > 1:
        codec["configuration"] = {"endian": "little"}
    return encode_json(
        {
            "attributes": {},
            "chunk_grid": {
                "configuration": {"chunk_shape": [metadata.chunk_rows, *metadata.shape[1:]]},
                "name": "regular",
            },
            "chunk_key_encoding": {"configuration": {"separator": "/"}, "name": "default"},
            "codecs": [codec],
            "data_type": metadata.dtype,
            "fill_value": fill,
            "node_type": "array",
            "shape": list(metadata.shape),
            "zarr_format": 3,
        }
    )


def parse_array(content: Mapping[str, Any]) -> ArrayMetadata:
    """The inverse of `array_json`; ValueError for a Zarr array that is not of the kind we write."""
    try:
        shape = tuple(int(size) for size in content["shape"])
        chunk = tuple(int(size) for size in content["chunk_grid"]["configuration"]["chunk_shape"])
        metadata = ArrayMetadata(shape, content["data_type"], chunk[0])
        if metadata.dtype not in NUMBERS or not shape or not 1 <= chunk[0] <= max(1, shape[0]):
            raise ValueError("dtype, shape or chunk shape")
        if json.loads(array_json(metadata)) != content:
            raise ValueError("chunk grid or codecs")
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise ValueError(f"not an array that STRIDE writes: {error}") from error
    return metadata


def chunk_file(array: Path, file: int, n_axes: int) -> Path:
    """Chunk file number `file` of the array in directory `array`: c/0, or c/0/0 for two axes, …"""
    return array.joinpath("c", str(file), *["0"] * (n_axes - 1))


def rows_per_file(row_bytes: int, shard_bytes: int) -> int:
    """How many rows one chunk file holds at most; one where a row alone is larger than `shard_bytes`."""
    return max(1, shard_bytes // row_bytes)
