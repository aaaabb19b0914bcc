"""Verifying an index: every byte against the manifests, every array against the others."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from index_format.confined import open_inside
from index_format.design import offsets_of, row_sizes
from index_format.errors import IndexDamaged, IndexFormatError, IndexNotFound
from index_format.layout import STAGE_GROUPS
from index_format.location import Given, locate
from index_format.manifest import MANIFEST, ZARR_JSON, Files, parse_manifest, read_document
from index_format.reader import Index, first_bad, local_copy, offset_ends, offsets_wrong
from index_format.shards import ranges

Progress = Callable[[int, int], None]
_READ_BYTES = 1 << 20
_SIGNATURE = "signature.json"  # of earlier releases, in no manifest


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with an index.

    Attributes
    ----------
    path : str        the file, relative to the index; for an invariant, the array or group
    kind : str        "missing", "extra", "length", "content" (a digest differs) or "invariant" (arrays
                      contradict each other)
    message : str     what was expected and what was found
    """

    path: str
    kind: Literal["missing", "extra", "length", "content", "invariant"]
    message: str


def verify(path: Given, *, progress: Progress | None = None) -> list[Problem]:
    """Find everything that is wrong with the index at `path`; an empty list when nothing is.

    Every file is read once and its SHA-256 compared with its manifest's; missing and extra files are found.
    Where all bytes are right, the arrays are checked against each other (a writer's mistake, not damage).
    Memory is bounded whatever the size. Unfinished stages (operators.partial) are no part of the index.

    Parameters
    ----------
    path : path or URL       of an index at a URL, its copy in the cache is verified
    progress : callable      called with (bytes read, bytes in all) as reading goes on

    Raises
    ------
    IndexNotFound, IndexIncomplete, IndexVersionError      when there is no index of this format to verify
    """
    try:
        root = local_copy(locate(path), progress)
    except IndexDamaged as error:
        return [Problem(MANIFEST, "content", error.message)]
    there = _names(root)
    if MANIFEST not in there and ZARR_JSON not in there:
        Index.open(path)  # says what is there instead
        raise IndexNotFound(f"{root} is no index", fix="stride index build makes one")
    # 1. every byte, against the manifests
    problems: list[Problem] = []
    todo: Files = {}
    begun = {name.partition("/")[0] for name in there if "/" in name}
    for prefix in ["", *(f"{group}/" for group in STAGE_GROUPS if group in begun)]:
        name = prefix + MANIFEST
        data = None
        try:
            data = read_document(root, name)
            files, _ = parse_manifest(data, root / name)
        except IndexDamaged as error:
            problems.append(Problem(name, "missing" if data is None else "content", error.message))
            continue
        todo.update({prefix + name: recorded for name, recorded in files.items()})
        problems += _find_extra(there, prefix, set(files))
    if "calibration" in begun and "operators" not in begun:
        message = "is missing, with all operators: the calibration is of some"
        problems.append(Problem(f"operators/{MANIFEST}", "missing", message))
    problems += _check_content(root, todo, progress)
    # 2. what opening says, of the index and of every stage
    try:
        index = Index.open(path)
        for group in STAGE_GROUPS:
            if index.has(group):
                index.group_attributes(group)
    except IndexFormatError as error:
        if not problems and not isinstance(error, IndexDamaged):
            raise  # another format version, say: whole, but not ours to judge
        return problems or [Problem(MANIFEST, "invariant", error.message)]
    # 3. arrays against each other
    if not problems:
        problems += [*_check_corpus(index), *_check_design(index)]
        if index.has("operators") and index.has("operators/seen"):
            seen = index.shape("operators/seen")
            if len(seen) != 1 or seen[0] > index.n_chunks:
                message = f"should have at most {index.n_chunks} entries, has shape {seen}"
                problems.append(Problem("operators/seen", "invariant", message))
    return problems


# ---- bytes ----


def _names(root: Path) -> list[str]:
    """List all files below, and directories, with a slash at their end."""
    found = []
    for here, directories, files in os.walk(root):
        relative = Path(here).relative_to(root)
        found += [f"{(relative / name).as_posix()}/" for name in directories]
        found += [(relative / name).as_posix() for name in files]
    return found


def _find_extra(there: list[str], prefix: str, files: set[str]) -> Iterator[Problem]:
    """Find files and directories that the manifest of a directory does not name."""
    known = files | {str(parent) for name in files for parent in Path(name).parents} | {MANIFEST, "."}
    elsewhere: set[str] = set()
    if not prefix:
        known.add(_SIGNATURE)
        elsewhere = {name for group in STAGE_GROUPS for name in (group, f"{group}.partial")}
    for name in there:
        relative = name.removeprefix(prefix)
        if not name.startswith(prefix) or not relative:
            continue
        top, inside, _ = relative.partition("/")
        if relative.rstrip("/") not in known and not (inside and top in elsewhere):
            yield Problem(name.rstrip("/"), "extra", "is not in the manifest")


def _check_content(root: Path, todo: Files, progress: Progress | None) -> Iterator[Problem]:
    """Compare every file with the length and the SHA-256 that its manifest records."""
    total = sum(length for length, _ in todo.values())
    done = 0
    for name, (length, sha256) in todo.items():
        digest = hashlib.sha256()
        found = 0
        try:
            with os.fdopen(open_inside(root, name), "rb") as file:
                # a file that grows while it is read is not read for ever
                while found <= length and (piece := file.read(_READ_BYTES)):
                    digest.update(piece)
                    found += len(piece)
                    if progress:
                        progress(min(done + found, total), total)
        except FileNotFoundError:
            yield Problem(name, "missing", "is in the manifest, but is no file")
        except IndexDamaged as error:  # a link, a device
            yield Problem(name, "content", error.message)
        except OSError as error:  # a sector that cannot be read
            yield Problem(name, "content", f"cannot be read: {error.strerror}")
        else:
            if found != length:
                yield Problem(name, "length", f"should have {length:,} bytes, has {found:,}")
            elif digest.hexdigest() != sha256:
                yield Problem(name, "content", f"should have SHA-256 {sha256}, has {digest.hexdigest()}")
        done += length


# ---- arrays against each other ----


def _check_corpus(index: Index) -> Iterator[Problem]:
    sound = True
    for name, last in offset_ends(index).items():
        if wrong := offsets_wrong(index.array(name), last):
            sound = False
            yield Problem(name, "invariant", wrong)
    if not sound:
        return
    chunk_offsets = index.array("corpus/chunk_offsets")
    for first, last in ranges(index.n_chunks):
        lengths = np.diff(chunk_offsets[first : last + 1])
        start = index.array("corpus/loss_start")[first:last]
        if wrong := first_bad(
            first, (start < 1) | (start > np.maximum(lengths, 1)), "chunk {} starts outside itself"
        ):
            yield Problem("corpus/loss_start", "invariant", wrong)
            break
    yield from _check_documents(index)
    if index.has("corpus/loss_mask"):
        mask = index.array("corpus/loss_mask")
        for first, last in ranges(index.n_tokens):
            if wrong := first_bad(first, mask[first:last] > 1, "token {} has a flag other than 0 and 1"):
                yield Problem("corpus/loss_mask", "invariant", wrong)
                break


def _check_documents(index: Index) -> Iterator[Problem]:
    """Compare chunk_document with document_offsets."""
    offsets = index.array("corpus/document_offsets")
    for first, last in ranges(index.n_documents):
        bounds = np.asarray(offsets[first : last + 1])
        low, high = int(bounds[0]), int(bounds[-1])
        for begin, end in ranges(high, low):
            expected = first + np.searchsorted(bounds, np.arange(begin, end), side="right") - 1
            found = index.array("corpus/chunk_document")[begin:end]
            if wrong := first_bad(
                begin, found != expected, "chunk {} has another document than document_offsets"
            ):
                yield Problem("corpus/chunk_document", "invariant", wrong)
                return


def _check_design(index: Index) -> Iterator[Problem]:
    columns = index.array("design/columns")
    sizes = np.zeros(index.n_subsets, np.int64)
    for first, last in ranges(index.n_chunks, width=index.degree):
        block = columns[first:last].astype(np.int64)
        bad = (block >= index.n_subsets).any(axis=1) | (np.diff(block, axis=1) <= 0).any(axis=1)
        message = "chunk {} has subsets that are not ascending, distinct and below K"
        if wrong := first_bad(first, bad, message):
            yield Problem("design/columns", "invariant", wrong)
            return
        sizes += row_sizes(block, index.n_subsets)
    if not np.array_equal(np.asarray(index.array("design/row_offsets")), offsets_of(sizes)):
        yield Problem("design/row_offsets", "invariant", "are not the sizes of the subsets in columns")
