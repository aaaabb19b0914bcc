"""The JSON documents of an index, in canonical bytes: manifest.json, and the zarr.json of groups and arrays.

A manifest has the length and SHA-256 of every file below its directory, and a digest of itself. The root has
one, and so has the group of every stage. Reading one validates the zarr.json files it names.

Any Zarr (v3) reader opens the arrays; zarr itself is not needed here. Only documents that STRIDE writes are
accepted: then dtype, byte order and chunks are known to be what a memory map needs.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from index_format.confined import is_inside, look_inside, open_inside
from index_format.errors import RESTORE, IndexDamaged
from index_format.layout import NUMBERS, check_arrays, check_attributes
from index_format.location import Location

ZARR_JSON = "zarr.json"
MANIFEST = "manifest.json"
DOCUMENT_BYTES = 1 << 28  # most of a manifest or a zarr.json: a line of a manifest names up to 256 MiB
Files = dict[str, tuple[int, str]]  # path -> (length, SHA-256)
ATTRIBUTES_KEY = "stride"
MOST_AXES = 8
MOST_VALUES = 1 << 56  # so that their bytes can be counted in 64 bits
_KIND = "stride-manifest"
_SHA256 = re.compile(r"[0-9a-f]{64}")


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


@dataclass(frozen=True, slots=True)
class Group:
    """A directory with a manifest: the root, or the group of a stage.

    Attributes
    ----------
    arrays : dict         "group/array" -> its metadata
    attributes : dict     under the key "stride" of the directory's own zarr.json
    files : dict          path below the index -> (length, SHA-256)
    digest : str          of the manifest
    """

    arrays: dict[str, ArrayMetadata]
    attributes: dict[str, Any]
    files: Files
    digest: str


def check_contents(attributes: Mapping[str, Any], arrays: Mapping[str, ArrayMetadata]) -> list[str]:
    """List what is wrong with the root's attributes, or else with its arrays, a line each."""
    return check_attributes(attributes) or check_arrays(
        {name: array.shape for name, array in arrays.items()},
        {name: array.dtype for name, array in arrays.items()},
        n_subsets=attributes["n_subsets"],
        degree=attributes["degree"],
    )


def encode_manifest(files: Mapping[str, tuple[int, str]]) -> tuple[bytes, str]:
    """Encode manifest.json; also returns the digest in it.

    Parameters
    ----------
    files : mapping      path relative to the manifest's directory -> (length in bytes, SHA-256 in hex)
    """
    content: dict[str, Any] = {
        "files": {path: {"length": length, "sha256": digest} for path, (length, digest) in files.items()},
        "kind": _KIND,
        "version": 1,
    }
    plain = encode_json(content)
    digest = hashlib.sha256(plain).hexdigest()
    # equals encode_json({**content, "digest": digest}), for "digest" sorts first; encoding takes long
    return b'{\n "digest": "%s",\n' % digest.encode() + plain.removeprefix(b"{\n"), digest


def parse_manifest(data: bytes | None, path: Location) -> tuple[Files, str]:
    """Parse a manifest into the files that its directory should hold, and its digest.

    Parameters
    ----------
    data : bytes, optional      the content of the file; None where it is missing
    path : of the file, for messages

    Returns
    -------
    files : dict      path -> (length, SHA-256); every path stays inside the manifest's directory
    digest : str

    Raises
    ------
    IndexDamaged      the manifest is missing, or any byte of it is not what was written
    """
    if data is None:
        raise IndexDamaged(f"{path} is missing", fix=RESTORE)
    try:
        content = decode_json(data)
        files = {name: _entry(name, entry) for name, entry in content["files"].items()}
        canonical, digest = encode_manifest(files)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise IndexDamaged(f"{path} is no manifest", fix=RESTORE) from None
    if data != canonical:
        raise IndexDamaged(f"{path} does not match its own digest", fix=RESTORE)
    return files, digest


def read_manifest(directory: Path) -> tuple[Files, str]:
    """Read and parse the manifest in `directory`; IndexDamaged where there is none."""
    return parse_manifest(read_document(directory, MANIFEST), directory / MANIFEST)


def read_document(root: Path, name: str) -> bytes | None:
    """Read a JSON file below `root`; None where there is none, IndexDamaged where it is far too long."""
    try:
        opened = open_inside(root, name)
    except (FileNotFoundError, NotADirectoryError):
        return None
    with os.fdopen(opened, "rb") as file:
        length = os.fstat(opened).st_size
        if length > DOCUMENT_BYTES:
            raise IndexDamaged(
                f"{root / name} has {length:,} bytes, more than the {DOCUMENT_BYTES:,} of any that stride "
                "writes",
                fix=RESTORE,
            )
        return file.read()


def read_group(root: Path, prefix: str) -> Group:
    """Read a manifest and every zarr.json that it names; compare the lengths of all files.

    Parameters
    ----------
    root : Path      of the index
    prefix : str     "" for the root's manifest, "group/" for a stage's

    Raises
    ------
    IndexDamaged
    """
    path = root / prefix / MANIFEST
    named, digest = parse_manifest(read_document(root, prefix + MANIFEST), path)
    files = {prefix + name: recorded for name, recorded in named.items()}
    for name, (length, _) in files.items():
        try:
            found = look_inside(root, name).st_size
        except FileNotFoundError:
            raise IndexDamaged(f"{root / name} is missing", fix=RESTORE) from None
        if found != length:
            raise IndexDamaged(f"{root / name} should have {length:,} bytes, has {found:,}", fix=RESTORE)
    arrays: dict[str, ArrayMetadata] = {}
    attributes: dict[str, Any] = {}
    for name, (_, sha256) in files.items():
        directory, _, last = name.rpartition("/")
        if last != ZARR_JSON:
            continue
        document = read_document(root, name)
        if document is None:
            raise IndexDamaged(f"{root / name} is missing", fix=RESTORE)
        try:
            if hashlib.sha256(document).hexdigest() != sha256:
                raise ValueError("other content than the manifest records")
            array = parse_array(document)
            if array is not None:
                arrays[directory] = array
            elif name == prefix + ZARR_JSON:
                attributes = parse_group(document)
        except ValueError as error:
            raise IndexDamaged(f"{root / name} is damaged: {error}", fix=RESTORE) from None
    for name, array in arrays.items():
        for file in range(array.n_files):
            chunk = f"{name}/{chunk_name(file, len(array.shape))}"
            if files.get(chunk, (-1, ""))[0] != array.chunk_rows * array.row_bytes:
                raise IndexDamaged(f"{root / chunk} does not fit array {name}", fix=RESTORE)
    return Group(arrays, attributes, files, digest)


def _entry(name: str, entry: Mapping[str, Any]) -> tuple[int, str]:
    """Return length and digest of a file; ValueError for what no manifest of ours says."""
    length, sha256 = entry["length"], entry["sha256"]
    if type(length) is not int or length < 0 or not _SHA256.fullmatch(sha256) or not is_inside(name):
        raise ValueError("no length, digest or name of a file")
    return length, sha256
