"""A directory with a manifest (the root, or a stage's group): its files, arrays and attributes, validated."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from index_format.build import partial_path
from index_format.errors import (
    RESTORE,
    IndexDamaged,
    IndexFormatError,
    IndexIncomplete,
    IndexNotFound,
    IndexVersionError,
)
from index_format.layout import FORMAT_VERSION, WITHOUT_MEMBERS
from index_format.location import Location
from index_format.manifest import MANIFEST, parse_manifest
from index_format.metadata import (
    ZARR_JSON,
    ArrayMetadata,
    chunk_name,
    decode_json,
    parse_group,
    read_node,
)
from index_format.places import Directory, Files, Place

STAGE_COMMANDS = {
    "operators": "stride train",
    "truth": "stride evaluate truth",
    "calibration": "stride calibrate",
    "run": "stride index build --from-run",
}


@dataclass(frozen=True, slots=True)
class Group:
    """What a manifest and the zarr.json files it names say.

    Attributes
    ----------
    arrays : dict         "group/array" -> its metadata
    attributes : dict     under the key "stride" of the directory's own zarr.json
    files : dict          path below the index -> (length, SHA-256)
    digest : str          of the manifest
    """

    arrays: dict[str, ArrayMetadata]
    attributes: dict[str, Any]
    files: dict[str, tuple[int, str]]
    digest: str


def read_attributes(place: Place) -> dict[str, Any]:
    """The root's attributes, once it is clear that there is an index of a version that we read."""
    path = place.path
    try:
        content = decode_json(place.read(ZARR_JSON))
    except FileNotFoundError:
        raise _not_there(place) from None
    except ValueError:
        raise IndexDamaged(f"{path / ZARR_JSON} is no JSON", fix=RESTORE) from None
    try:
        attributes = parse_group(content)
    except ValueError:
        attributes = {}
    if "format_version" not in attributes:
        if place.exists(MANIFEST):
            raise IndexDamaged(f"{path / ZARR_JSON} has no format version", fix=RESTORE)
        raise IndexNotFound(f"{path} is no STRIDE index", fix="stride index build makes one")
    version = attributes["format_version"]
    if version not in (FORMAT_VERSION, WITHOUT_MEMBERS):
        raise IndexVersionError(
            f"index {path} has format version {version!r}, this release reads {FORMAT_VERSION} and "
            f"{WITHOUT_MEMBERS}",
            fix="use the release that built it, or build it again",
        )
    return attributes


def _not_there(place: Place) -> IndexFormatError:
    """What is wrong where no zarr.json is."""
    path = place.path
    if isinstance(path, Path) and partial_path(path).is_dir() and not path.exists():
        return IndexIncomplete(
            f"the build of {path} has not finished", fix="rerun the command that began it; it resumes"
        )
    if place.exists(MANIFEST):
        return IndexDamaged(f"{path / ZARR_JSON} is missing", fix=RESTORE)
    if not isinstance(path, Path):
        return IndexNotFound(
            f"{path} is no index: there is no {path / ZARR_JSON}",
            fix="give the URL of the directory that stride index build made",
        )
    what = "is no index" if path.exists() else "does not exist"
    return IndexNotFound(f"{path} {what}", fix="stride index build makes one")


def stage_command(group: str, path: object) -> str:
    """The command that makes a stage's group of an index on this machine."""
    if group == "run":  # it comes with the index
        return f"{STAGE_COMMANDS[group]} RUN --out {path} --overwrite"
    return f"{STAGE_COMMANDS[group]} --index {path}"


def read_stage(place: Place, group: str) -> Group:
    """The stage group `group` of an index, validated as `Index.open` validates the root."""
    try:
        return read_group(place, f"{group}/", check=True)
    except IndexDamaged as error:
        if isinstance(place, Directory):
            # that of a run says so itself, and a calibration is replaced without
            anew = " --overwrite" if group in ("operators", "truth") else ""
            fix = f"{stage_command(group, place.path)}{anew} makes it again"
            raise IndexDamaged(error.message, fix=fix) from None
        raise


def read_group(place: Place, prefix: str, *, check: bool) -> Group:
    """Read a manifest and every zarr.json that it names: the root's, or, with prefix "group/", a stage's."""
    documents = place.read_all([prefix + MANIFEST])
    files, digest = parse_manifest(documents.get(prefix + MANIFEST), place.path / (prefix + MANIFEST))
    files = {prefix + name: recorded for name, recorded in files.items()}
    arrays: dict[str, ArrayMetadata] = {}
    attributes: dict[str, Any] = {}
    if check:
        for name, (length, _) in files.items():
            place.check_length(name, length)
    nodes = [name for name in files if name.rpartition("/")[2] == ZARR_JSON]
    documents = place.read_all(nodes)
    for name in nodes:
        if name not in documents:
            raise IndexDamaged(f"{place.path / name} is missing", fix=RESTORE)
        try:
            if check and hashlib.sha256(documents[name]).hexdigest() != files[name][1]:
                raise ValueError("other content than the manifest records")
            array = read_node(documents[name])
            if array is not None:
                arrays[name.rpartition("/")[0]] = array
            elif name == prefix + ZARR_JSON:
                attributes = parse_group(decode_json(documents[name]))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise IndexDamaged(f"{place.path / name} is damaged: {error}", fix=RESTORE) from None
    for name, array in arrays.items():
        _check_files(name, array, files, place.path)
    return Group(arrays, attributes, files, digest)


def _check_files(name: str, array: ArrayMetadata, files: Files, path: Location) -> None:
    """The manifest must name the chunk files that the metadata asks for, of the length it asks for."""
    row_bytes = np.dtype(array.dtype).itemsize * int(np.prod(array.shape[1:], dtype=np.int64))
    for file in range(array.n_files):
        chunk = f"{name}/{chunk_name(file, len(array.shape))}"
        if files.get(chunk, (-1, ""))[0] != array.chunk_rows * row_bytes:
            raise IndexDamaged(f"{path / chunk} does not fit array {name}", fix=RESTORE)
