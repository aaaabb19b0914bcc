"""A directory with a manifest (the root, or a stage's group): its files, arrays and attributes, validated."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from index_format.build import partial_path
from index_format.errors import IndexDamaged, IndexIncomplete, IndexNotFound, IndexVersionError
from index_format.layout import FORMAT_VERSION
from index_format.manifest import MANIFEST, read_manifest
from index_format.metadata import (
    ATTRIBUTES_KEY,
    ZARR_JSON,
    ArrayMetadata,
    chunk_file,
    decode_json,
    parse_array,
)

REBUILD = "restore the index from a copy, or build it again"
STAGE_COMMANDS = {"operators": "stride train", "truth": "stride evaluate truth"}


@dataclass(frozen=True, slots=True)
class Group:
    """What a manifest and the zarr.json files it names say.

    Attributes
    ----------
    arrays : dict         "group/array" -> its metadata
    attributes : dict     under the key "stride" of the directory's own zarr.json
    files : dict          path below the directory -> (length, SHA-256)
    digest : str          of the manifest
    """

    arrays: dict[str, ArrayMetadata]
    attributes: dict[str, Any]
    files: dict[str, tuple[int, str]]
    digest: str


def read_attributes(path: Path) -> dict[str, Any]:
    """The root's attributes, once it is clear that `path` is an index of a version that we read."""
    try:
        content = decode_json((path / ZARR_JSON).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        if partial_path(path).is_dir() and not path.exists():
            raise IndexIncomplete(
                f"the build of {path} has not finished", fix="rerun the command that began it; it resumes"
            ) from None
        if (path / MANIFEST).exists():
            raise IndexDamaged(f"{path / ZARR_JSON} is missing", fix=REBUILD) from None
        what = "is no index" if path.exists() else "does not exist"
        raise IndexNotFound(f"{path} {what}", fix="stride index build makes one") from None
    except ValueError:
        raise IndexDamaged(f"{path / ZARR_JSON} is no JSON", fix=REBUILD) from None
    attributes = content.get("attributes", {}) if isinstance(content, dict) else {}
    attributes = attributes.get(ATTRIBUTES_KEY) if isinstance(attributes, dict) else None
    if not isinstance(attributes, dict) or "format_version" not in attributes:
        if (path / MANIFEST).exists():
            raise IndexDamaged(f"{path / ZARR_JSON} has no format version", fix=REBUILD)
        raise IndexNotFound(f"{path} is no STRIDE index", fix="stride index build makes one")
    version = attributes["format_version"]
    if version != FORMAT_VERSION:
        raise IndexVersionError(
            f"index {path} has format version {version!r}, this release reads {FORMAT_VERSION}",
            fix="use the release that built it, or build it again",
        )
    return attributes


def read_stage(path: Path, group: str) -> Group:
    """The stage group `group` of the index at `path`, validated as `Index.open` validates the root."""
    fix = f"{STAGE_COMMANDS[group]} --index {path} makes it again"
    try:
        return read_group(path / group, f"{group}/", check=True)
    except IndexDamaged as error:
        raise IndexDamaged(error.message, fix=fix) from None


def read_group(directory: Path, prefix: str, *, check: bool) -> Group:
    """Read the manifest in `directory` and every zarr.json it names; array names begin with `prefix`."""
    files, digest = read_manifest(directory)
    arrays: dict[str, ArrayMetadata] = {}
    attributes: dict[str, Any] = {}
    for name, (length, sha256) in files.items():
        path = directory / name
        if check:
            _check_length(path, length)
        if path.name != ZARR_JSON:
            continue
        try:
            data = path.read_bytes()
            if check and hashlib.sha256(data).hexdigest() != sha256:
                raise ValueError("other content than the manifest records")
            content = decode_json(data)
            if content["node_type"] == "array":
                arrays[prefix + str(Path(name).parent)] = parse_array(content)
            elif name == ZARR_JSON:
                attributes = content["attributes"].get(ATTRIBUTES_KEY, {})
        except FileNotFoundError:
            raise IndexDamaged(f"{path} is missing", fix=REBUILD) from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise IndexDamaged(f"{path} is damaged: {error}", fix=REBUILD) from None
    for name, array in arrays.items():
        _check_files(name, name.removeprefix(prefix), array, files, directory)
    return Group(arrays, attributes, files, digest)


def _check_length(path: Path, length: int) -> None:
    try:
        found = path.stat().st_size
    except (FileNotFoundError, NotADirectoryError):
        raise IndexDamaged(f"{path} is missing", fix=REBUILD) from None
    if found != length:
        raise IndexDamaged(f"{path} should have {length:,} bytes, has {found:,}", fix=REBUILD)


def _check_files(
    name: str, relative: str, array: ArrayMetadata, files: Mapping[str, tuple[int, str]], directory: Path
) -> None:
    """The manifest must name the chunk files that the metadata asks for, of the length it asks for."""
    row_bytes = np.dtype(array.dtype).itemsize * int(np.prod(array.shape[1:], dtype=np.int64))
    for file in range(array.n_files):
        path = chunk_file(Path(relative), file, len(array.shape)).as_posix()
        if files.get(path, (-1, ""))[0] != array.chunk_rows * row_bytes:
            raise IndexDamaged(f"{directory / path} does not fit array {name}", fix=REBUILD)
