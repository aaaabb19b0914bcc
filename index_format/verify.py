"""Verifying an index: every byte against the manifests, every array against what the layout says of it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np

from index_format.design import member_dtype, offsets_of, row_sizes
from index_format.errors import IndexDamaged, IndexFormatError, IndexNotFound, IndexUnreachable
from index_format.layout import STAGE_GROUPS
from index_format.location import RemotePath
from index_format.manifest import MANIFEST, parse_manifest
from index_format.metadata import ZARR_JSON
from index_format.offsets import first_bad, offset_ends, offsets_wrong, ranges
from index_format.places import Place, open_place
from index_format.problem import Problem
from index_format.reader import Index
from index_format.shards import ShardedArray

Progress = Callable[[int, int], None]
_Array = np.ndarray | ShardedArray


def verify(path: str | os.PathLike[str] | RemotePath, *, progress: Progress | None = None) -> list[Problem]:
    """Find everything that is wrong with the index at `path`; an empty list when nothing is.

    Every file is read once and its SHA-256 compared with its manifest's; missing and extra files are found.
    Where all bytes are right, the arrays are checked against each other (a writer's mistake, not damage).
    Memory is bounded whatever the size. Unfinished stages (operators.partial) are no part of the index.

    Parameters
    ----------
    path : path or URL      (extra files are found where files can be listed: not on a web server)
    progress : callable      called with (bytes read, bytes in all) as reading goes on

    Raises
    ------
    IndexNotFound, IndexIncomplete, IndexVersionError      when there is no index of this format to verify
    """
    place = open_place(path)
    if not _exists(place, MANIFEST) and not _exists(place, ZARR_JSON):
        Index.open(path)  # says what is there instead
        raise IndexNotFound(f"{place.path} is no index", fix="stride index build makes one")
    problems: list[Problem] = []
    todo: list[tuple[str, tuple[int, str]]] = []
    there = place.names()
    begun = {name.partition("/")[0] for name in there or () if "/" in name}
    for directory in ["", *(group for group in STAGE_GROUPS if group in begun or place.has_group(group))]:
        name = _join(directory, MANIFEST)
        data = None
        try:
            data = place.read_all([name]).get(name)
            files, _ = parse_manifest(data, place.path / name)
        except IndexDamaged as error:
            problems.append(Problem(name, "missing" if data is None else "content", error.message))
            continue
        todo += [(_join(directory, name), recorded) for name, recorded in files.items()]
        if there is not None:
            problems += _find_extra(there, directory, set(files))
    if "calibration" in begun and "operators" not in begun:
        message = "is missing, with all operators: the calibration is of some"
        problems.append(Problem(_join("operators", MANIFEST), "missing", message))
    problems += _check_content(place, todo, progress)
    try:
        index = Index.open(path)
        stages = [group for group in STAGE_GROUPS if index.has(group)]
        for group in stages:
            index.group_attributes(group)  # a stage is opened, and validated, when it is asked for
    except IndexFormatError as error:
        if not problems and not isinstance(error, IndexDamaged):
            raise  # another format version, say: whole, but not ours to judge
        if not problems:
            problems.append(Problem(MANIFEST, "invariant", error.message))
        return problems
    if not problems:
        problems += _check_corpus(index)
        problems += _check_design(index)
        if "operators" in stages and index.has("operators/seen"):
            seen = index.shape("operators/seen")
            if len(seen) != 1 or seen[0] > index.n_chunks:
                message = f"should have at most {index.n_chunks} entries, has shape {seen}"
                problems.append(Problem("operators/seen", "invariant", message))
    return problems


def _exists(place: Place, name: str) -> bool:
    """Whether anything is there, be it a link: that is a problem of its own."""
    try:
        return place.exists(name)
    except IndexDamaged:
        return True


def _join(directory: str, name: str) -> str:
    return f"{directory}/{name}" if directory else name


def _find_extra(there: Iterable[str], directory: str, files: set[str]) -> Iterator[Problem]:
    """Files and directories below `directory` that its manifest does not know."""
    known = files | {str(parent) for name in files for parent in Path(name).parents} | {MANIFEST, "."}
    elsewhere = (
        set() if directory else {name for group in STAGE_GROUPS for name in (group, f"{group}.partial")}
    )
    for name in there:
        if directory and not name.startswith(f"{directory}/"):
            continue
        relative = name.removeprefix(f"{directory}/") if directory else name
        top, inside, _ = relative.partition("/")
        if not directory and relative == "signature.json":  # of earlier releases
            continue
        if relative.rstrip("/") not in known and relative and not (inside and top in elsewhere):
            yield _extra(name.rstrip("/"))


def _extra(path: str) -> Problem:
    return Problem(path, "extra", "is not in the manifest")


def _check_content(
    place: Place, todo: list[tuple[str, tuple[int, str]]], progress: Progress | None
) -> Iterator[Problem]:
    total = sum(length for _, (length, _) in todo)
    done = 0
    for name, (length, sha256) in todo:
        digest = hashlib.sha256()
        found = 0
        try:
            for piece in place.pieces(name, length):
                digest.update(piece)
                found += len(piece)
                if progress:
                    progress(min(done + found, total), total)
        except IndexUnreachable:
            raise
        except FileNotFoundError:
            yield Problem(name, "missing", "is in the manifest, but is no file")
        except IndexDamaged as error:  # a zip file's own checksum
            yield Problem(name, "content", error.message)
        except OSError as error:  # a sector that cannot be read
            yield Problem(name, "content", f"cannot be read: {error.strerror}")
        else:
            if found != length:
                yield Problem(name, "length", f"should have {length:,} bytes, has {found:,}")
            elif digest.hexdigest() != sha256:
                yield Problem(name, "content", f"should have SHA-256 {sha256}, has {digest.hexdigest()}")
        done += length


# ---- what arrays say of each other ----


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
    """chunk_document and document_offsets say the same."""
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
    sound = True
    for first, last in ranges(index.n_chunks):
        block = columns[first:last].astype(np.int64)
        bad = (block >= index.n_subsets).any(axis=1) | (np.diff(block, axis=1) <= 0).any(axis=1)
        if wrong := first_bad(
            first, bad, "chunk {} has subsets that are not ascending, distinct and below K"
        ):
            yield Problem("design/columns", "invariant", wrong)
            sound = False
            break
    if not sound:
        return
    offsets = np.asarray(index.array("design/row_offsets"))  # (K + 1,)
    if not np.array_equal(offsets, offsets_of(row_sizes(columns, index.n_subsets))):
        yield Problem("design/row_offsets", "invariant", "are not the sizes of the subsets in columns")
        return
    if not index.has("design/row_members"):
        return
    members = index.array("design/row_members")
    if members.dtype != member_dtype(index.n_chunks):
        message = f"should be {member_dtype(index.n_chunks)}, found {members.dtype}"
        yield Problem("design/row_members", "invariant", message)
    cursor = offsets[:-1].copy()  # where the next member of each subset is
    for first, last in ranges(index.n_chunks, width=index.degree):
        subsets = columns[first:last].ravel()
        order = np.argsort(subsets, kind="stable")
        counts = np.bincount(subsets, minlength=index.n_subsets)
        positions = np.arange(len(order)) + (cursor - offsets_of(counts)[:-1]).repeat(counts)
        if not np.array_equal(members[positions], first + order // index.degree):
            yield Problem("design/row_members", "invariant", "are not the transpose of columns")
            return
        cursor += counts
