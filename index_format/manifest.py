"""manifest.json: the length and SHA-256 of every file, in canonical bytes that carry their own digest."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from index_format.confined import is_inside, read_inside
from index_format.errors import RESTORE, IndexDamaged
from index_format.location import Location
from index_format.metadata import decode_json, encode_json

MANIFEST = "manifest.json"
_KIND = "stride-manifest"
_MANIFEST_BYTES = 1 << 28
_SHA256 = re.compile(r"[0-9a-f]{64}")


def encode_manifest(files: Mapping[str, tuple[int, str]]) -> tuple[bytes, str]:
    """The bytes of manifest.json and the digest in them.

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
    # what encode_json({**content, "digest": digest}) is: "digest" sorts first, and encoding takes long
    return b'{\n "digest": "%s",\n' % digest.encode() + plain.removeprefix(b"{\n"), digest


def read_manifest(directory: Path) -> tuple[dict[str, tuple[int, str]], str]:
    """`parse_manifest` of the manifest in `directory`; IndexDamaged where there is none."""
    path = directory / MANIFEST
    try:
        data = read_inside(directory, MANIFEST, limit=_MANIFEST_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        data = None
    return parse_manifest(data, path)


def parse_manifest(data: bytes | None, path: Location) -> tuple[dict[str, tuple[int, str]], str]:
    """The files that the directory of a manifest should hold, and the manifest's digest.

    Parameters
    ----------
    data : bytes, optional      the content of the file; None where it is missing
    path : of the file, for messages

    Returns
    -------
    files : dict      path -> (length, SHA-256)
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


def _entry(name: str, entry: Mapping[str, Any]) -> tuple[int, str]:
    """What a manifest says of a file; ValueError for what no manifest of ours says."""
    length, sha256 = entry["length"], entry["sha256"]
    if type(length) is not int or length < 0 or not _SHA256.fullmatch(sha256) or not is_inside(name):
        raise ValueError("no length, digest or name of a file")
    return length, sha256
