"""`stride index verify --deep`: what a maker of an index could have put into it, with right digests.

`index_format.verify` finds damage, and arrays that contradict each other. A maker who means harm writes
digests, too: texts that are none, tokens that the model does not have, subsets that he has chosen, numbers
that are not finite, paths of other people's machines. Each of these is found here, and the first place of
each is told. What he says in sound numbers (which document did what) nobody but him can know.
"""

from __future__ import annotations

import codecs
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from index_format.confined import refuse_strange_files
from index_format.design import build_columns
from index_format.errors import IndexFormatError, IndexMismatch
from index_format.layout import STAGE_GROUPS
from index_format.offsets import ranges
from index_format.problem import Problem
from stride_cli.corpus.documents import MOST_ID_BYTES
from stride_cli.corpus.ids import SeenIds
from stride_cli.errors import ModelError
from stride_cli.models.kinds import kind_of_index
from stride_cli.output import note, progress

if TYPE_CHECKING:
    from index_format.reader import Index

Found = Iterator[Problem]
_BLOCK_BYTES = 1 << 20  # of text
# on any system; what a home directory is meant by; a URL of a file
_ABSOLUTE = re.compile(r"[/~]|[A-Za-z]:[\\/]|\\\\|file:", re.IGNORECASE)
# what holds people's texts and the names that they gave: no paths, however they begin
_FREE_TEXT = frozenset(("classes", "columns", "names", "nulls", "reading", "texts"))


def find_made_up(index: Index, model_path: str | None = None) -> Iterator[Problem]:
    """What no build or stage of STRIDE writes, in an index whose bytes `index_format.verify` finds whole.

    Nothing is downloaded and no code is run; no weights are loaded. Memory is bounded but for the arrays that
    any reader holds (offsets, bases of operators) and what is fetched of an index elsewhere.

    Parameters
    ----------
    model_path : the model to compare tokens with; default: the index's own, where it lies on this machine

    Yields
    ------
    Problem      of kind "maker"

    Raises
    ------
    ModelError, IndexMismatch      `model_path` leads to no model, or to another one than the index's
    """
    vocabulary = _vocabulary(index, model_path)
    checks: list[Callable[[], Found]] = [
        lambda: _strange_files(index),
        lambda: _attributes(index),
        lambda: _ids(index),
        lambda: _texts(index, "corpus/text"),
        lambda: _tokens(index, vocabulary),
        lambda: _design(index),
        lambda: _operators(index),
        lambda: _calibration(index),
        lambda: _truth(index),
    ]
    with progress("looking closer", len(checks), unit="checks") as ticker:
        for check in checks:
            yield from check()
            ticker.advance()


def _made_up(path: str, message: str) -> Problem:
    return Problem(path, "maker", message)


def _understood(path: str, read: Callable[[], Any]) -> Found:
    """A problem where a stage's records cannot be taken apart."""
    try:
        read()
    except IndexFormatError as error:
        yield _made_up(path, error.message)


def _strange_files(index: Index) -> Found:
    """Links, FIFOs and devices, in unfinished stages too."""
    if not isinstance(index.path, Path) or not index.path.is_dir():
        return
    root = Path(os.path.realpath(index.path))  # the way to the index may be a link of its reader's own
    try:
        refuse_strange_files(root)
    except IndexFormatError as error:
        yield _made_up(".", error.message)


# ---- attributes ----


def _attributes(index: Index) -> Found:
    fingerprints = index.attributes["fingerprints"]
    for name in ("corpus", "tokenizer", "model"):
        if not isinstance(fingerprints.get(name), str):
            yield _made_up("zarr.json", f"there is no fingerprint of its {name}")
    groups = {"": dict(index.attributes)}
    groups |= {f"{group}/": index.group_attributes(group) for group in STAGE_GROUPS if index.has(group)}
    for group, attributes in groups.items():
        for where, text in _strings(attributes, ""):
            if _ABSOLUTE.match(text):
                message = f"attribute {where} has the absolute path {text[:200]!r}: no way from the index"
                yield _made_up(f"{group}zarr.json", message)


def _strings(value: Any, where: str) -> Iterator[tuple[str, str]]:
    """(name, text) of all strings in a JSON value that are not free text."""
    if isinstance(value, str):
        yield where.removeprefix("."), value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            if name not in _FREE_TEXT:
                yield from _strings(inner, f"{where}.{name}")
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from _strings(inner, f"{where}[{number}]")


# ---- corpus ----


def _texts(index: Index, name: str) -> Found:
    """Whether each text is UTF-8: all of them joined are, and none begins inside a character."""
    if not index.has(f"{name}_bytes"):
        return
    data = index.array(f"{name}_bytes")
    offsets = np.asarray(index.array(f"{name}_offsets"))

    def bad(place: int) -> Problem:
        document = int(np.searchsorted(offsets, place, side="right")) - 1
        return _made_up(f"{name}_bytes", f"of document {document} is no UTF-8")

    decoder = codecs.getincrementaldecoder("utf-8")()
    for first in range(0, len(data), _BLOCK_BYTES):
        piece = np.asarray(data[first : first + _BLOCK_BYTES])
        last = first + len(piece)
        low, high = np.searchsorted(offsets, [first, last], side="left")
        inside = (piece[offsets[low:high] - first] & 0xC0) == 0x80
        split = int(offsets[low + int(np.argmax(inside))]) if inside.any() else None
        held = len(decoder.getstate()[0])
        try:
            decoder.decode(piece.tobytes(), final=last == len(data))
        except UnicodeDecodeError as error:
            place = first - held + error.start
            yield bad(place if split is None else min(place, split))
            return
        if split is not None:
            yield bad(split)
            return


def _ids(index: Index) -> Found:
    """Ids are text, none is longer than a build takes, and none is there twice."""
    wrong = list(_texts(index, "corpus/document_id"))
    if wrong:
        yield from wrong
        return
    lengths = np.diff(np.asarray(index.array("corpus/document_id_offsets")))
    if len(lengths) and int(lengths.max()) > MOST_ID_BYTES:
        document = int(np.argmax(lengths))
        message = f"of document {document} has {lengths[document]:,} bytes, more than {MOST_ID_BYTES:,}"
        yield _made_up("corpus/document_id_bytes", message)
        return
    seen = SeenIds()
    for document in range(index.n_documents):
        earlier = seen.take(index.document_id(document), "document", document)
        if earlier is not None:
            message = f"of document {document} is that of document {earlier.rpartition(':')[2]}, too"
            yield _made_up("corpus/document_id_bytes", message)
            return


def _tokens(index: Index, vocabulary: int | None) -> Found:
    """No chunk is longer than a block, and no token is one that the model does not have."""
    longest = int(index.attributes["block_size"])
    offsets = index.array("corpus/chunk_offsets")
    for first, last in ranges(index.n_chunks):
        lengths = np.diff(offsets[first : last + 1])
        if (lengths > longest).any():
            row = int(np.argmax(lengths > longest))
            message = f"chunk {first + row} has {lengths[row]:,} tokens, more than the block size {longest:,}"
            yield _made_up("corpus/chunk_offsets", message)
            break
    if kind_of_index(index) == "classifier":
        yield from _rows(index)
        return
    if vocabulary is None:
        return
    tokens = index.array("corpus/tokens")
    for first, last in ranges(index.n_tokens):
        block = np.asarray(tokens[first:last])
        if int(block.max()) >= vocabulary:
            place = int(np.argmax(block >= vocabulary))
            message = f"token {first + place} is {block[place]}, and the model has {vocabulary:,}"
            yield _made_up("corpus/tokens", message)
            return


def _rows(index: Index) -> Found:
    """Of a classifier, chunk i is (i, a label of its own)."""
    classes = len((index.attributes.get("config") or {}).get("classes") or ())
    tokens = index.array("corpus/tokens")
    if index.n_tokens != 2 * index.n_chunks:
        yield _made_up("corpus/tokens", f"are not two for each of {index.n_chunks:,} rows")
        return
    for first, last in ranges(index.n_chunks, width=2):
        pairs = np.asarray(tokens[2 * first : 2 * last]).reshape(-1, 2)
        wrong = (pairs[:, 0] != np.arange(first, last)) | (pairs[:, 1] >= classes)
        if wrong.any():
            row = int(np.argmax(wrong))
            message = (
                f"of row {first + row} are {pairs[row].tolist()}: its number, and one of {classes} labels"
            )
            yield _made_up("corpus/tokens", message)
            return


def _vocabulary(index: Index, given: str | None) -> int | None:
    """How many tokens the index's model has; None of a classifier, and (with a note) where it is not here."""
    if kind_of_index(index) == "classifier":
        return None
    from stride_cli.corpus.context import vocabulary_size
    from stride_cli.models.language.files import files_fingerprint, find_offline
    from stride_cli.models.loading import path_of_model

    try:
        path = given or path_of_model(index)
        source = find_offline(path)
        if source is None:
            raise ModelError(
                f"the model '{path}' is not on this machine", fix="give one that is with --model PATH"
            )
        where = source.directory if source.gguf is None else source.directory / source.gguf
        index.check_fingerprint("model", files_fingerprint(where))
        return vocabulary_size(where)
    except (ModelError, IndexMismatch, ValueError) as error:  # the last: the index has no fingerprint
        if given is not None and isinstance(error, ModelError | IndexMismatch):
            raise
        said = getattr(error, "message", error)
        note(f"its tokens were not compared with a vocabulary ({said}): --model PATH names the model")
        return None


# ---- design ----


def _design(index: Index) -> Found:
    """Subsets are those that the seed draws: chosen ones could put the blame where their maker likes."""
    kind = index.attributes["design"]
    if kind != "regular":
        yield _made_up("design/columns", f"is of kind {str(kind)[:100]!r}, which this release does not draw")
        return
    columns = index.array("design/columns")
    sizes = {"n_subsets": index.n_subsets, "degree": index.degree, "seed": index.seed}
    for first, last in ranges(index.n_chunks, width=index.degree):
        try:
            drawn = build_columns(first, last, **sizes)
        except ValueError as error:
            yield _made_up("zarr.json", f"draws no design: {error}")
            return
        wrong = (np.asarray(columns[first:last]) != drawn).any(axis=1)
        if wrong.any():
            row = int(np.argmax(wrong))
            message = f"chunk {first + row} is not in the subsets that seed {index.seed} draws for it"
            yield _made_up("design/columns", message)
            return


# ---- stages ----


def _operators(index: Index) -> Found:
    if not index.has("operators"):
        return
    from stride_cli.operators.checkpoints import stored_checkpoints
    from stride_cli.operators.designs import design_seed

    checkpoints = []
    for problem in _understood("operators", lambda: checkpoints.extend(stored_checkpoints(index))):
        yield problem
        return
    for number, checkpoint in enumerate(checkpoints, 1):
        drawn = design_seed(index.seed, number)
        if checkpoint.design_seed != drawn:
            message = (
                f"the subsets of checkpoint {number} are drawn from {checkpoint.design_seed}, not {drawn}"
            )
            yield _made_up("operators/zarr.json", message)
    for number in range(len(checkpoints) + 1):
        yield from _understood("operators", partial(_read_operators, index, number))
    yield from _finite(index)
    yield from _flags(index, "operators/seen")


def _read_operators(index: Index, number: int) -> None:
    """IndexDamaged where operators cannot be read, or what they are multiplied by is no number."""
    from stride_cli.operators.store import Operators

    scale = Operators.from_index(index, number).direct_scale
    with index.understanding("operators"):
        if scale is not None and not _is_number(scale):
            raise ValueError(f"direct_scale is {scale!r}, no finite number")


def _calibration(index: Index) -> Found:
    if not index.has("calibration"):
        return
    from stride_cli.attribution.calibration import stored_calibration

    def read() -> None:
        found = stored_calibration(index)
        if found is None:  # of what was there before
            return
        with index.understanding("calibration"):
            if np.isinf(found.losses).any():
                raise ValueError("a loss is not finite")
            if (np.diff(found.scored) <= 0).any() or (found.scored < 1).any():
                raise ValueError("lengths of responses do not rise")
            numbers = () if found.scale is None else vars(found.scale).values()
            if not all(_is_number(number) for number in numbers):
                raise ValueError("a scale that is no finite number")

    yield from _understood("calibration", read)


def _truth(index: Index) -> Found:
    if not index.has("truth"):
        return
    from stride_cli.training.truth import Truth

    def read() -> None:
        try:
            truth = Truth.from_index(index)
        except IndexMismatch:
            if int(index.group_attributes("truth")["n_chunks"]) < index.n_chunks:
                return  # documents were appended since
            raise
        with index.understanding("truth"):
            shape = (len(truth.masks), len(truth.seeds), len(truth.queries))
            if truth.losses.shape != shape or len(truth.alpha) != shape[0]:
                raise ValueError(f"losses have shape {truth.losses.shape}, should have {shape}")
            if truth.base_losses.shape != shape[2:]:
                raise ValueError(f"base_losses have shape {truth.base_losses.shape}, should have {shape[2:]}")

    yield from _understood("truth", read)


def _finite(index: Index) -> Found:
    """Gates, bases and projections are finite, of all checkpoints; curves of a fit may have gaps."""
    for name in index.names("operators"):
        array = index.array(name)
        if array.dtype.kind != "f" or "training_log_" in name:
            continue
        for first, last in ranges(len(array), width=math.prod(array.shape[1:])):
            fine = np.isfinite(np.asarray(array[first:last])).reshape(last - first, -1).all(axis=1)
            if not fine.all():
                yield _made_up(name, f"row {first + int(np.argmin(fine))} has numbers that are not finite")
                break


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _flags(index: Index, name: str) -> Found:
    if not index.has(name):
        return
    flags = index.array(name)
    for first, last in ranges(len(flags)):
        wrong = np.asarray(flags[first:last]) > 1
        if wrong.any():
            yield _made_up(name, f"entry {first + int(np.argmax(wrong))} is neither 0 nor 1")
            return
