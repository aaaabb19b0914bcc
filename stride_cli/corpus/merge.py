"""Join indexes that were built apart to the index of their corpora, one after the other."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from index_format.durable import require_space
from index_format.errors import IndexMismatch
from index_format.layout import partial_path
from index_format.location import Location, local_directory
from index_format.reader import Index
from index_format.shards import ranges
from index_format.writer import IndexWriter
from stride_cli import output
from stride_cli.corpus import build
from stride_cli.corpus.documents import Document, SeenIds, bad, chained, merged_digest
from stride_cli.corpus.forms import Form
from stride_cli.corpus.options import DesignOptions, Range
from stride_cli.corpus.plan import choose_design
from stride_cli.corpus.summary import disk_bytes
from stride_cli.errors import UsageError
from stride_cli.remembered import recorded_path, recorded_places
from stride_cli.version import __version__


def merge_indexes(paths: Sequence[str | Location], out: str | Path, *, overwrite: bool = False) -> Index:
    """Publish, at `out`, the index of the corpora of several indexes, one after the other.

    Chunks, documents and design are those of one build of the joined corpora, bit for bit. K and d are those
    asked for of the parts, else those that suit the whole. Ranges of one corpus are put in order. Documents
    that all parts numbered (``--number-ids``) are numbered anew. Interrupted, the same call goes on behind
    the last whole part. Stages (operators, truth, calibration) stay behind: they belong to other subsets.

    Raises:
        UsageError: Fewer than two indexes, one of them twice, or a classifier's.
        IndexMismatch: Models, tokenizers, chunk lengths or designs differ; a range is lacking.
        CorpusError: Two parts have a document of one id, or there are more subsets than chunks.
        StorageFull: The disk has no room for it; found before anything is written.
        IndexExists, IndexBusy, IndexIncomplete, IndexDamaged: As `IndexWriter.create`; a part is damaged.
    """
    place = local_directory(out)
    parts = _in_order([_Part(path) for path in paths])
    _check_parts(parts)
    n_chunks = sum(part.index.n_chunks for part in parts)
    first = parts[0]
    k, d = choose_design(n_chunks, first.design, first.config.get("most_subsets"))
    exact = all(part.holds_documents for part in parts)
    numbered = all(part.numbered for part in parts)
    key = build.settings_key({"merged": [part.index.digest for part in parts]})
    with build.storage_errors(place), IndexWriter.create(place, build_key=key, overwrite=overwrite) as writer:
        # 1. what could go wrong is found before anything is written
        if not numbered:
            _check_ids(parts, place.parent)
        masked = any(part.index.has("corpus/loss_mask") for part in parts)
        unmasked = sum(part.index.n_tokens for part in parts if not part.index.has("corpus/loss_mask"))
        n_bytes = sum(part.n_bytes for part in parts) + (unmasked if masked else 0) + 2 * n_chunks * d
        there = disk_bytes(partial_path(place) / "data") or 0
        require_space(place.parent, max(0, n_bytes - there), what=f"merging into {place}")
        # 2. the arrays of the corpus, part by part; with texts, the digest that one build would have
        state = writer.state or {"parts": 0, "digest": first.corpus}
        left = parts[state["parts"] :]
        with output.progress("merging", sum(part.n_bytes for part in left) / 1e6, unit="MB") as ticker:
            for part in left:
                if exact and part is not first:
                    begun, index = writer.length("corpus/document_offsets") - 1, part.index
                    documents = (
                        Document(str(begun + n) if numbered else index.document_id(n), index.document_text(n))
                        for n in range(index.n_documents)
                    )
                    state["digest"] = chained(state["digest"], documents)
                for copied in _copy(writer, part.index, masked=masked, numbered=numbered):
                    ticker.advance(copied / 1e6)
                state["parts"] += 1
                writer.commit(state)
        corpus = state["digest"] if exact else merged_digest([part.corpus for part in parts])
        # 3. the subsets of all chunks
        build.append_design(writer, n_chunks, n_subsets=k, degree=d, seed=first.index.seed)
        attributes = first.index.attributes
        model = attributes.get("model_path")
        # older releases counted less
        counted = [name for name in first.counts if all(name in part.counts for part in parts)]
        writer.publish(
            {
                **attributes,
                "n_subsets": k,
                "degree": d,
                "fingerprints": {**attributes["fingerprints"], "corpus": corpus},
                "model_path": None if model is None else first.seen_from(place, model),
                "config": _merged_config(parts, place, exact=exact),
                "counts": {name: sum(part.counts[name] for part in parts) for name in counted},
                "created_by": f"stride {__version__}",
            }
        )
    return Index.open(place)


class _Part:
    """An index that is merged, and what it records of how it was built.

    Attributes:
        corpus: Fingerprint of its corpus.
        design: K and d as they were asked for.
        range: The range of a corpus that it was built of; 1/1: all.
        entries: Its own record of sources, and those of what was appended.
        recorded, sources: The files that it was built of, as it records them, and as seen from here.
    """

    def __init__(self, path: str | Location) -> None:
        index = self.index = Index.open(path)
        self.n_bytes = sum(index.array(name).nbytes for name in index.names("corpus"))
        self.place = str(index.path.resolve() if isinstance(index.path, Path) else index.path)
        self.corpus = str(index.attributes["fingerprints"]["corpus"])
        config = self.config = index.attributes.get("config") or {}
        self.counts: dict[str, int] = index.attributes.get("counts") or {}
        k, d = config.get("n_subsets", index.n_subsets), config.get("degree", index.degree)
        self.design = DesignOptions(n_subsets=k, degree=d)
        self.range = Range.parse(config.get("range") or "1/1")
        self.entries = [config, *config.get("appended", [])]
        self.recorded = [source for entry in self.entries for source in entry.get("sources", [])]
        self.sources = [(recorded_places(each, index.path) or [each])[0] for each in self.recorded]

    @property
    def holds_documents(self) -> bool:
        """Tell whether it has all documents as they were read: only texts, which are kept."""
        exact = self.config.get("merged_exactly", True)
        return self.index.has("corpus/text_bytes") and self.counts.get("conversations") == 0 and exact

    @property
    def numbered(self) -> bool:
        """Tell whether ids are numbers, because none were read."""
        entries = [*self.entries, *self.config.get("merged", [])]
        return all((entry.get("reading") or {}).get("number_ids") is True for entry in entries)

    def seen_from(self, place: Path, recorded: str) -> str:
        """Return a recorded path as an index at another place records it."""
        places = recorded_places(recorded, self.index.path)
        return recorded_path(places[0], place) if places and recorded.startswith(os.curdir) else recorded

    def __str__(self) -> str:
        files = [os.path.relpath(each) if Path(each).is_absolute() else each for each in self.sources[:3]]
        named = ", ".join(files) + (", …" if len(self.sources) > 3 else "")
        return f"{self.index.path} (of {named}{f', range {self.range}' if self.range.count > 1 else ''})"


def _in_order(parts: Sequence[_Part]) -> list[_Part]:
    """Put the ranges of one corpus in order, where the first of them was; refuse gaps, and a part twice."""
    families: dict[Any, dict[int, _Part]] = {}
    for part in parts:
        whole = part.range.count == 1
        family = families.setdefault(part.place if whole else (part.range.count, *part.sources), {})
        if (twin := family.setdefault(part.range.number, part)) is not part:
            same = f"{twin.place} and {part.place} are the same part: it is given twice"
            raise UsageError(same, fix="name each part once")
    ordered: list[_Part] = []
    for family in families.values():
        first = next(iter(family.values()))
        count = first.range.count
        if lacking := [number for number in range(1, count + 1) if number not in family]:
            shown = ", ".join(f"{number}/{count}" for number in lacking[:3])
            found = f"expected all {count} ranges of {', '.join(first.sources)}, found {len(family)}"
            fix = f"build what is lacking: stride index build … --range {lacking[0]}/{count} --out …"
            raise IndexMismatch(f"{found}: {shown} lacking", fix=fix)
        ordered += [family[number] for number in sorted(family)]
    return ordered


def _check_parts(parts: Sequence[_Part]) -> None:
    """Refuse parts that make no index together: see `merge_indexes`."""
    if len(parts) < 2:
        raise UsageError(f"expected two indexes or more, found {len(parts)}", fix="name the others, too")
    for part in parts:
        if part.config.get("kind") == "classifier":
            found = f"index '{part.index.path}' is of a classifier, and merging joins texts"
            raise UsageError(found, fix="build one index of all examples")
    first = parts[0]
    expected = _compared(first)
    for part in parts[1:]:
        for what, (found, fix) in _compared(part).items():
            wanted = expected[what][0]
            if found != wanted:
                shown = ["none" if value is None else str(value)[:64] for value in (found, wanted)]
                if fix.startswith("--"):
                    how = f"without {fix}" if wanted is None else f"with {fix} {wanted}"
                    fix = f"build {part.index.path} again {how}"
                which = f"{part.index.path} cannot be merged with {first.index.path}"
                raise IndexMismatch(f"{which}: its {what} is {shown[0]}, expected {shown[1]}", fix=fix)


def _compared(part: _Part) -> dict[str, tuple[Any, str]]:
    """List the settings that must be equal in all parts, by name, each with its flag or a remedy."""
    index, design = part.index, part.design
    prints = index.attributes["fingerprints"]
    form, texts = Form.recorded(index.attributes), "yes" if index.has("corpus/text_bytes") else "no"
    return {
        **{
            f"fingerprint of the {kind}": (prints.get(kind), "build all parts for one model")
            for kind in ("model", "tokenizer", "settings")
        },
        "seed": (index.seed, "--seed"),
        "number of subsets K": (design.n_subsets, "--subsets"),
        "degree d": (design.degree, "--degree"),
        "chunk length": (index.attributes["block_size"], "--block-size"),
        "form": (form and f"{form.name} ({form.fingerprint[:12]})", "build all parts with one --form"),
        "keeping of texts": (texts, "build all parts with --no-text, or all without"),
        "type of the tokens": (index.array("corpus/tokens").dtype.name, "build all parts with one release"),
    }


def _check_ids(parts: Sequence[_Part], scratch: Path) -> None:
    """CorpusError where two parts have a document of one id."""
    seen = SeenIds(directory=scratch if scratch.is_dir() else None)
    total = sum(part.index.n_documents for part in parts)
    with output.progress("comparing ids", total, unit="documents") as ticker:
        for part in parts:
            for document in range(part.index.n_documents):
                name = part.index.document_id(document)
                if (before := seen.take(name, str(part), document)) is not None:
                    where, _, number = before.rpartition(":")
                    again = f"id {name[:80]!r} of document {document} again"
                    fix = "give each document its own id, or build the parts with --number-ids"
                    found = f"{again}, first as document {number} of {where}"
                    raise bad(str(part), "ids that differ", found, fix)
            ticker.advance(part.index.n_documents)


def _copy(writer: IndexWriter, part: Index, *, masked: bool, numbered: bool) -> Iterator[int]:
    """Append the corpus arrays of a part, numbers shifted by how many there are; yield the bytes copied.

    Masks are there from the first chunk on where any part has some. Ids that are numbers are written anew.
    """
    n_documents = max(0, writer.length("corpus/document_offsets") - 1)
    shifts = {
        "corpus/chunk_document": n_documents,
        "corpus/chunk_offsets": writer.length("corpus/tokens"),
        "corpus/document_offsets": writer.length("corpus/chunk_document"),
        "corpus/document_id_offsets": writer.length("corpus/document_id_bytes"),
        "corpus/text_offsets": writer.length("corpus/text_bytes"),
    }
    for name in part.names("corpus"):
        if name.startswith("corpus/title_") or (numbered and name.startswith("corpus/document_id_")):
            continue
        array = part.array(name)
        begun = name.endswith("_offsets") and writer.length(name) > 0  # of two zeros one counts
        for first, last in ranges(len(array), int(begun)):
            block = np.asarray(array[first:last])
            writer.append(name, block + block.dtype.type(shifts.get(name, 0)))
            yield block.nbytes
        if not len(array):
            writer.append(name, np.zeros(0, array.dtype))
    for first, last in ranges(part.n_documents):
        build.append_titles(writer, n_documents + first, [*map(part.document_title, range(first, last))])
        if numbered:
            ids = [str(n_documents + number) for number in range(first, last)]
            writer.append_strings("corpus/document_id", ids)
    if masked and not part.has("corpus/loss_mask"):
        n_chunks = shifts["corpus/document_offsets"]
        build.append_suffix_masks(writer, n_chunks, n_chunks + part.n_chunks)


def _merged_config(parts: Sequence[_Part], place: Path, *, exact: bool) -> dict[str, Any]:
    """Return the configuration that one build of the joined corpora would record, and the parts."""
    config = {key: value for key, value in parts[0].config.items() if key not in ("appended", "range")}
    sources: list[str] = []
    merged: list[dict[str, Any]] = []
    first_document = 0
    for part in parts:
        seen = [part.seen_from(place, source) for source in part.recorded]
        if part.range.number == 1:
            sources += seen
        about: dict[str, Any] = {"range": str(part.range)} if part.range.count > 1 else {}
        about |= {"sources": seen, "reading": part.config.get("reading"), "corpus": part.corpus}
        merged.append(about | {"first_document": first_document})
        first_document += part.index.n_documents
    return {**config, "sources": sources, "merged": merged, "merged_exactly": exact}
