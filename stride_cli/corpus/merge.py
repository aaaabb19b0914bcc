"""Join indexes that were built apart to the index of their corpora, one after the other."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from index_format.durable import require_space
from index_format.errors import IndexIncomplete, IndexMismatch
from index_format.location import Location, local_directory
from index_format.offsets import ranges
from index_format.reader import Index
from index_format.writer import IndexWriter
from stride_cli import __version__, output
from stride_cli.corpus.build import append_design, settings_key, storage_errors, suffix_masks
from stride_cli.corpus.documents import Document, merged_digest
from stride_cli.corpus.ids import SeenIds
from stride_cli.corpus.options import DesignOptions
from stride_cli.corpus.plan import choose_design
from stride_cli.corpus.ranges import Range
from stride_cli.errors import CorpusError, UsageError
from stride_cli.recorded_paths import recorded_path, recorded_places

_COUNTED = (
    "documents", "chunks", "tokens", "scored_tokens", "unscored_documents", "conversations",
    "skipped_records",
)  # fmt: skip


def merge_indexes(paths: Sequence[str | Location], out: str | Path, *, overwrite: bool = False) -> Index:
    """Publish, at `out`, the index of the corpora of several indexes, one after the other.

    Chunks, documents and design are those of one build of the joined corpora, bit for bit; K and d are what
    was asked for of the parts, else what suits the whole. Ranges of one corpus are put in order. Documents
    that all parts numbered (``--number-ids``) are numbered anew. Interrupted, the same call goes on behind
    the last part that was whole. Stages (operators, truth, calibration) stay behind: they are of subsets and
    gates that the merged index does not have.

    Raises
    ------
    UsageError         less than two indexes, one of them twice, or a classifier's
    IndexMismatch      parts of different models, tokenizers, chunk lengths or designs; a range is lacking
    CorpusError        a document's id is in two parts, or there are more subsets than chunks
    StorageFull        the disk has no room for it, which is found out before anything is written
    IndexExists, IndexBusy, IndexIncomplete, IndexDamaged      as `IndexWriter.create`; a part is damaged
    """
    place = local_directory(out)
    parts = in_order([Index.open(path) for path in paths])
    check_parts(parts)
    key = settings_key({"merged": [part.digest for part in parts]})
    with storage_errors(place), IndexWriter.create(place, build_key=key, overwrite=overwrite) as writer:
        merged = copy_parts(writer, parts)
        first = parts[0].attributes
        model = first.get("model_path")
        writer.publish(
            merged.attributes
            | {
                "fingerprints": {**first["fingerprints"], "corpus": merged.digest},
                "model_path": None if model is None else _seen_from(place, model, parts[0].path),
                "config": _merged_config(parts, place, exact=merged.exact),
            }
        )
    return Index.open(place)


class SharedId(CorpusError):
    """A document's id is in two parts."""


@dataclass(frozen=True)
class Merged:
    """What parts are together.

    Attributes
    ----------
    attributes : dict      of the index, but for those that say where things are
    digest : str           fingerprint of the corpus
    exact : bool           whether it is that of one build. It is not where the parts do not hold their
                           documents as they were read: without texts, or with conversations
    """

    attributes: dict[str, Any]
    digest: str
    exact: bool


def in_order(parts: Sequence[Index]) -> list[Index]:
    """Parts as they were given; the ranges of one corpus in order, where the first of them was.

    Raises
    ------
    IndexMismatch      some of its ranges are lacking
    UsageError         one part is given twice
    """
    families: dict[Any, list[Index]] = {}
    for part in parts:
        found = range_of(part)
        path = part.path.resolve() if isinstance(part.path, Path) else part.path
        name = str(path) if found is None else (found.count, *_sources(part))
        families.setdefault(name, []).append(part)
    ordered: list[Index] = []
    for family in families.values():
        by_number: dict[int, Index] = {}
        for part in family:
            found = range_of(part) or Range(1, 1)
            twin = by_number.setdefault(found.number, part)
            if twin is not part:
                again = "" if twin.path == part.path else f": {twin.path} and {part.path} are range {found}"
                raise UsageError(f"{part.path} is given twice{again}", fix="name each part once")
        count = (range_of(family[0]) or Range(1, 1)).count
        if lacking := [number for number in range(1, count + 1) if number not in by_number]:
            shown = ", ".join(f"{number}/{count}" for number in lacking[:3]) + (
                ", …" if len(lacking) > 3 else ""
            )
            raise IndexMismatch(
                f"expected all {count} ranges of {', '.join(_sources(family[0]))}, found {len(by_number)}: "
                f"{shown} {'is' if len(lacking) == 1 else 'are'} lacking",
                fix=f"build what is lacking: stride index build … --range {lacking[0]}/{count} --out …",
            )
        ordered += [by_number[number] for number in sorted(by_number)]
    return ordered


def check_parts(parts: Sequence[Index]) -> None:
    """Refuse what makes no index together: see `merge_indexes`."""
    if len(parts) < 2:
        raise UsageError(f"expected two indexes or more, found {len(parts)}", fix="name the others, too")
    first = parts[0]
    for part in parts:
        if _config(part).get("kind") == "classifier":
            raise UsageError(
                f"index '{part.path}' is of a classifier, and merging joins texts",
                fix="build one index of all examples",
            )
    for part in parts[1:]:
        ours, theirs = first.attributes["fingerprints"], part.attributes["fingerprints"]
        for kind in ("model", "tokenizer", "settings"):
            if ours.get(kind) != theirs.get(kind):
                raise _differs(
                    first, part, f"fingerprint of the {kind}", ours.get(kind), theirs.get(kind),
                    "build all parts for one model",
                )  # fmt: skip
        mine, others = _asked(first), _asked(part)
        for what, (value, flag) in mine.items():
            if others[what][0] != value:
                how = f"with {flag} {value}" if value is not None else f"without {flag}"
                if what == "keeping of texts":
                    how = "as the other was, with or without --no-text"
                raise _differs(first, part, what, value, others[what][0], f"build {part.path} again {how}")
        if first.array("corpus/tokens").dtype != part.array("corpus/tokens").dtype:
            raise _differs(
                first, part, "type of the tokens", first.array("corpus/tokens").dtype,
                part.array("corpus/tokens").dtype, "build all parts with one release of stride",
            )  # fmt: skip


def _differs(first: Index, part: Index, what: str, ours: Any, theirs: Any, fix: str) -> IndexMismatch:
    shown = ["none" if value is None else str(value)[:64] for value in (ours, theirs)]
    return IndexMismatch(
        f"{part.path} cannot be merged with {first.path}: its {what} is {shown[1]}, expected {shown[0]}",
        fix=fix,
    )


def _asked(part: Index) -> dict[str, tuple[Any, str]]:
    """What was asked for when it was built, by what people call it, and the flag."""
    config = _config(part)
    return {
        "seed": (part.seed, "--seed"),
        "number of subsets K": (config.get("n_subsets", part.n_subsets), "--subsets"),
        "degree d": (config.get("degree", part.degree), "--degree"),
        "chunk length": (part.attributes["block_size"], "--block-size"),
        "keeping of texts": ("yes" if part.has("corpus/text_bytes") else "no", "--no-text"),
    }


def copy_parts(writer: IndexWriter, parts: Sequence[Index]) -> Merged:
    """Append the corpora of parts to a writer, and draw the design; what is committed is taken up.

    Raises
    ------
    CorpusError, StorageFull      as `merge_indexes`
    IndexIncomplete               what is committed is the beginning of another kind of build
    """
    n_chunks = sum(part.n_chunks for part in parts)
    k, d = choose_design(n_chunks, _design(parts[0]), _config(parts[0]).get("most_subsets"))
    numbered = all(_numbered(part) for part in parts)
    state = writer.state or {"parts": 0, "digest": parts[0].attributes["fingerprints"]["corpus"]}
    if "parts" not in state:
        raise IndexIncomplete(
            f"{writer.path}.partial was begun by one process",
            fix="go on without --workers and --engine, or discard it with --overwrite",
        )
    if not numbered:
        _check_ids(parts, writer.path.parent)
    _check_space(writer.path, parts, n_chunks, d)
    copy = _Copy(writer, parts, numbered=numbered)
    exact = all(_holds_documents(part) for part in parts)
    digest = bytes.fromhex(state["digest"])
    total = sum(sum(_bytes(part).values()) for part in parts[state["parts"] :])
    with output.progress("merging", total / 1e6, unit="MB") as ticker:
        for number, part in enumerate(parts[state["parts"] :], state["parts"]):
            if exact and number > 0:
                digest = copy.chain(part, digest)
            for done in copy.append(part):
                ticker.advance(done / 1e6)
            writer.commit({"parts": number + 1, "digest": digest.hex()})
    append_design(writer, n_chunks, n_subsets=k, degree=d, seed=parts[0].seed)
    if not exact:
        digest = merged_digest([part.attributes["fingerprints"]["corpus"] for part in parts])
    attributes = {
        "seed": parts[0].seed,
        "n_subsets": k,
        "degree": d,
        "design": parts[0].attributes["design"],
        "block_size": parts[0].attributes["block_size"],
        "counts": _counts(parts),
        "created_by": f"stride {__version__}",
    }
    return Merged(attributes, digest.hex(), exact)


class _Copy:
    """Appends parts to an index that is being written."""

    def __init__(self, writer: IndexWriter, parts: Sequence[Index], *, numbered: bool) -> None:
        self._writer = writer
        self._numbered = numbered
        # in one build masks are there from the first chunk on, where any chunk needs one
        self._masked = any(part.has("corpus/loss_mask") for part in parts)
        self._texts = parts[0].has("corpus/text_bytes")

    @property
    def _documents(self) -> int:
        return max(0, self._writer.length("corpus/document_offsets") - 1)

    def append(self, part: Index) -> Iterator[int]:
        """Append a part; yields the bytes that were copied."""
        write, length = self._writer.append, self._writer.length
        tokens, chunks, documents = length("corpus/tokens"), length("corpus/chunk_document"), self._documents
        if self._masked:
            yield from self._append_masks(part)
        if self._numbered:
            yield from self._append_numbers(part.n_documents)
        else:
            yield from self._append_strings(part, "corpus/document_id")
        if self._texts:
            yield from self._append_strings(part, "corpus/text")
        yield from self._append_offsets(part, "corpus/chunk_offsets", tokens)
        yield from self._append_offsets(part, "corpus/document_offsets", chunks)
        for name, more in (("chunk_document", documents), ("loss_start", 0), ("tokens", 0)):
            for block in _blocks(part, f"corpus/{name}"):
                write(f"corpus/{name}", block + block.dtype.type(more) if more else block)
                yield block.nbytes

    def chain(self, part: Index, digest: bytes) -> bytes:
        """The fingerprint of what was there, and of a part of plain texts behind it."""
        first = self._documents
        for document in range(part.n_documents):
            name = str(first + document) if self._numbered else part.document_id(document)
            text = part.document_text(document)
            digest = Document(id=name, text=text, source="", line=0).digest(digest)
        return digest

    def _append_offsets(self, part: Index, name: str, start: int) -> Iterator[int]:
        if not self._writer.length(name):
            self._writer.append(name, np.zeros(1, np.int64))
        array = part.array(name)
        for first, stop in ranges(len(array), 1):
            block = np.asarray(array[first:stop]) + start
            self._writer.append(name, block)
            yield block.nbytes

    def _append_strings(self, part: Index, name: str) -> Iterator[int]:
        start = self._writer.length(f"{name}_bytes")
        yield from self._append_offsets(part, f"{name}_offsets", start)
        self._writer.append(f"{name}_bytes", np.zeros(0, np.uint8))
        for block in _blocks(part, f"{name}_bytes"):
            self._writer.append(f"{name}_bytes", block)
            yield block.nbytes

    def _append_numbers(self, count: int) -> Iterator[int]:
        first = self._documents
        for low, high in ranges(count):
            self._writer.append_strings("corpus/document_id", [str(first + n) for n in range(low, high)])
            yield 8 * (high - low)

    def _append_masks(self, part: Index) -> Iterator[int]:
        if part.has("corpus/loss_mask"):
            for block in _blocks(part, "corpus/loss_mask"):
                self._writer.append("corpus/loss_mask", block)
                yield block.nbytes
            return
        offsets, starts = part.array("corpus/chunk_offsets"), part.array("corpus/loss_start")
        for low, high in ranges(part.n_chunks, width=part.attributes["block_size"]):
            lengths = np.diff(np.asarray(offsets[low : high + 1]))
            masks = suffix_masks(lengths, np.asarray(starts[low:high]).astype(np.int64))
            self._writer.append("corpus/loss_mask", masks)


def _blocks(part: Index, name: str) -> Iterator[np.ndarray]:
    array = part.array(name)
    for first, stop in ranges(len(array)):
        yield np.asarray(array[first:stop])


def _check_ids(parts: Sequence[Index], scratch: Path) -> None:
    """CorpusError where a document of two parts has one id."""
    seen = SeenIds(directory=scratch if scratch.is_dir() else None)
    total = sum(part.n_documents for part in parts)
    with output.progress("comparing ids", total, unit="documents") as ticker:
        for part in parts:
            called = _called(part)
            for document in range(part.n_documents):
                name = part.document_id(document)
                if (before := seen.take(name, called, document)) is not None:
                    where, _, number = before.rpartition(":")
                    raise SharedId(
                        f"{called}: expected ids that differ, found id {name[:80]!r} of document {document} "
                        f"again, first as document {number} of {where}",
                        fix="give each document its own id, or build the parts with --number-ids",
                    )
            ticker.advance(part.n_documents)


def _called(part: Index) -> str:
    """A part, and what it was built from."""
    sources = _sources(part)
    named = ", ".join(os.path.relpath(each) if Path(each).is_absolute() else each for each in sources[:3])
    found = range_of(part)
    of = f"{named}{', …' if len(sources) > 3 else ''}"
    return f"{part.path} (of {of}{f', range {found}' if found is not None else ''})"


def _bytes(part: Index) -> dict[str, int]:
    """What is copied of a part, by array."""
    return {
        name: int(np.prod(part.shape(name))) * part.array(name).dtype.itemsize
        for name in part.names("corpus")
    }


def _check_space(path: Path, parts: Sequence[Index], n_chunks: int, degree: int) -> None:
    """StorageFull where the disk cannot hold the merged index."""
    copied = sum(sum(_bytes(part).values()) for part in parts)
    if any(part.has("corpus/loss_mask") for part in parts):
        copied += sum(part.n_tokens for part in parts if not part.has("corpus/loss_mask"))
    # columns; members of the subsets, and as much again while they are sorted
    design = n_chunks * degree * (2 + 2 * (4 if n_chunks <= 1 << 32 else 8))
    partial = path.with_name(path.name + ".partial") / "data"
    there = sum(file.stat().st_size for file in partial.rglob("*") if file.is_file())
    require_space(path.parent, max(0, copied + design - there), what=f"merging into {path}")


def _counts(parts: Sequence[Index]) -> dict[str, int]:
    counts = [part.attributes.get("counts") or {} for part in parts]
    # of what one part did not count nobody knows how many
    known = [name for name in _COUNTED if all(name in each for each in counts)]
    return {name: sum(each[name] for each in counts) for name in known}


def _holds_documents(part: Index) -> bool:
    """Whether its documents are known as they were read: they are texts, all of them, and kept."""
    counts = part.attributes.get("counts") or {}
    merged_exactly = _config(part).get("merged_exactly", True)
    return part.has("corpus/text_bytes") and counts.get("conversations") == 0 and merged_exactly


def _numbered(part: Index) -> bool:
    """Whether its documents' ids are their numbers, because no ids were read."""
    config = _config(part)
    entries = [config, *config.get("merged", []), *config.get("appended", [])]
    return all((entry.get("reading") or {}).get("number_ids") is True for entry in entries)


def _design(part: Index) -> DesignOptions:
    """K and d as they were asked for."""
    config = _config(part)
    return DesignOptions(
        n_subsets=config.get("n_subsets", part.n_subsets), degree=config.get("degree", part.degree)
    )


def range_of(part: Index) -> Range | None:
    """The range of a corpus that an index is of."""
    written = _config(part).get("range")
    return None if written is None else Range.parse(written)


def _config(part: Index) -> Mapping[str, Any]:
    return part.attributes.get("config") or {}


def _sources(part: Index) -> list[str]:
    """What it was built from, as seen from here."""
    config = _config(part)
    entries = [config, *config.get("appended", [])]
    return [
        (recorded_places(source, part.path) or [source])[0]
        for entry in entries
        for source in entry.get("sources", [])
    ]


def _seen_from(place: Path, recorded: str, index: Location) -> str:
    """What an index has recorded, as one at another place records it."""
    places = recorded_places(recorded, index)
    return recorded_path(places[0], place) if places and recorded.startswith(os.curdir) else recorded


def _merged_config(parts: Sequence[Index], place: Path, *, exact: bool) -> dict[str, Any]:
    """What the merged index records of how it was made: what one build of the joined corpora would have,
    and what its parts were."""
    config = {key: value for key, value in _config(parts[0]).items() if key not in ("appended", "range")}
    sources: list[str] = []
    merged: list[dict[str, Any]] = []
    first_document = 0
    for part in parts:
        own = _config(part)
        seen = [
            _seen_from(place, source, part.path)
            for entry in (own, *own.get("appended", []))
            for source in entry.get("sources", [])
        ]
        found = range_of(part)
        if found is None or found.number == 1:
            sources += seen
        entry = {"sources": seen, "reading": own.get("reading"), "first_document": first_document}
        entry |= {"corpus": part.attributes["fingerprints"]["corpus"]}
        merged.append(entry if found is None else entry | {"range": str(found)})
        first_document += part.n_documents
    return {**config, "sources": sources, "merged": merged, "merged_exactly": exact}
