"""manifest.json: the length and SHA-256 of every file below a directory, and a digest of itself.

The root has one, and so has the group of every stage. Reading one validates the zarr.json files it names.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from index_format.confined import is_inside, look_inside, read_inside
from index_format.errors import RESTORE, IndexDamaged
from index_format.location import Location
from index_format.metadata import (
    ZARR_JSON,
    ArrayMetadata,
    chunk_name,
    decode_json,
    encode_json,
    parse_array,
    parse_group,
)

MANIFEST = "manifest.json"
DOCUMENT_BYTES = 1 << 28  # most of a manifest or a zarr.json: a line of a manifest names up to 256 MiB
Files = dict[str, tuple[int, str]]  # path -> (length, SHA-256)
_KIND = "stride-manifest"
_SHA256 = re.compile(r"[0-9a-f]{64}")


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
    """Read a JSON file below `root`; None where there is none."""
    try:
        return read_inside(root, name, limit=DOCUMENT_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return None


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
        _check_length(root, name, length)
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
        _check_chunk_files(name, array, files, root)
    return Group(arrays, attributes, files, digest)


def _check_length(root: Path, name: str, length: int) -> None:
    try:
        found = look_inside(root, name).st_size
    except FileNotFoundError:
        raise IndexDamaged(f"{root / name} is missing", fix=RESTORE) from None
    if found != length:
        raise IndexDamaged(f"{root / name} should have {length:,} bytes, has {found:,}", fix=RESTORE)


def _check_chunk_files(name: str, array: ArrayMetadata, files: Files, root: Path) -> None:
    """Compare the chunk files of an array, and their lengths, with those that the manifest names."""
    for file in range(array.n_files):
        chunk = f"{name}/{chunk_name(file, len(array.shape))}"
        if files.get(chunk, (-1, ""))[0] != array.chunk_rows * array.row_bytes:
            raise IndexDamaged(f"{root / chunk} does not fit array {name}", fix=RESTORE)


def _entry(name: str, entry: Mapping[str, Any]) -> tuple[int, str]:
    """Return length and digest of a file; ValueError for what no manifest of ours says."""
    length, sha256 = entry["length"], entry["sha256"]
    if type(length) is not int or length < 0 or not _SHA256.fullmatch(sha256) or not is_inside(name):
        raise ValueError("no length, digest or name of a file")
    return length, sha256
