"""Build and extend an index: documents in, a published index out; bounded memory, resumable after a kill."""

from __future__ import annotations

import hashlib
import itertools
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from index_format.design import build_columns
from index_format.errors import IndexFormatError, IndexIncomplete
from index_format.layout import FORMAT_VERSION
from index_format.location import local_directory
from index_format.reader import Index
from index_format.writer import IndexWriter
from stride_cli import __version__, output
from stride_cli.corpus.chunking import Blocks, DocumentTokenizer, Encoded
from stride_cli.corpus.documents import EMPTY_CORPUS, merged_digest
from stride_cli.corpus.hub_files import pinned
from stride_cli.corpus.options import DEFAULT_BLOCK_SIZE, BuildOptions
from stride_cli.corpus.plan import CorpusCounts, choose_block_size, choose_design, limited_design
from stride_cli.corpus.ranges import Range
from stride_cli.corpus.readers import Document, ReadOptions, open_documents
from stride_cli.corpus.streams import ReadLog, find_sources
from stride_cli.errors import CorpusError, StorageError
from stride_cli.hub import is_hub_address
from stride_cli.recorded_paths import recorded_path
from stride_cli.remembered import recall, remember

_COMMIT_SHARE = 0.05  # of the time; on a slow or busy disk commits are further apart
_BATCH_DOCUMENTS = 256
_BATCH_CHARACTERS = 1 << 20
_DESIGN_BLOCK = 1 << 16  # chunks
_MASK_BLOCK = 1 << 16  # chunks


@dataclass(frozen=True)
class IndexedModel:
    """The model that an index is built for.

    Attributes
    ----------
    tokenizer : transformers tokenizer         the checkpoint's own
    tokenizer_fingerprint, fingerprint : str   recorded; a query against another model or tokenizer is refused
    path : str, optional                       recorded, the default model of later commands: a hub id as it
                                               is, what is on disk as it is seen from the index
    context : int, optional                    its longest sequence, which no chunk exceeds
    settings_fingerprint : str, optional       recorded, and compared as the others are
    most_subsets : int, optional               K at most, where none is asked for: `context.subsets_bound`
    """

    tokenizer: Any
    tokenizer_fingerprint: str
    fingerprint: str
    path: str | None = None
    context: int | None = None
    settings_fingerprint: str | None = None
    most_subsets: int | None = None

    @property
    def fingerprints(self) -> dict[str, str]:
        """As an index records them."""
        found = {"tokenizer": self.tokenizer_fingerprint, "model": self.fingerprint}
        return found | ({"settings": self.settings_fingerprint} if self.settings_fingerprint else {})


@dataclass(frozen=True, slots=True)
class _Progress:
    """What a commit records: the documents in the index, the chained digest of them, and what was counted."""

    documents: int = 0
    digest: str = EMPTY_CORPUS.hex()
    scored_tokens: int = 0
    unscored_documents: int = 0
    conversations: int = 0


def build_index(
    sources: Sequence[str],
    model: IndexedModel,
    out: str | Path,
    options: BuildOptions = BuildOptions(),
    reading: ReadOptions = ReadOptions(),
) -> Index:
    """Read a corpus, chunk it, draw its design and publish the index at `out`.

    A build that was interrupted (even by kill -9) goes on where its last commit was, when it is called again
    with the same corpus and settings, and gives the same bytes as one that was not.

    Parameters
    ----------
    sources : sequence of str
        As `read_documents`.
    model : IndexedModel
        Whose tokenizer makes the tokens.
    options : BuildOptions
        Chunks, design, and how the build proceeds.
    reading : ReadOptions
        Field names and what happens to bad records.

    Raises
    ------
    CorpusError
        A record that cannot be used, a corpus smaller than K, or one that has changed since the interrupted
        build.
    UsageError
        Chunks longer than the model's context, or a degree that is more than the chunks.
    IndexFormatError
        `out` exists, is being built by another process, or holds an unfinished build from other settings.
    StorageError
        The disk refuses.
    """
    block_size = choose_block_size(options.block_size, model.context)
    chunker = DocumentTokenizer(model.tokenizer, block_size=block_size)
    local_directory(out)
    sources = [pinned(source) for source in sources]
    # before anything is created: no such file, a pattern without a match
    part = None if options.range is None else Range.parse(options.range)
    documents, log = open_documents(sources, reading, scratch=Path(out).absolute().parent, part=part)
    settings = settings_of_build(model, options, block_size)
    if part is not None:
        settings["range"] = str(part)
    with (
        storage_errors(out),
        IndexWriter.create(out, build_key=settings_key(settings), overwrite=options.overwrite) as writer,
    ):
        if "parts" in (writer.state or {}):
            raise IndexIncomplete(
                f"{out}.partial was begun by several processes, which built parts of it",
                fix="go on with the same --workers, or discard it with --overwrite",
            )
        corpus = _Corpus(writer, chunker, store_text=options.store_text)
        progress = corpus.add(documents, log, _Progress(), options.commit_seconds)
        # of a part, whose design is for looking at it alone
        design = options if part is None else limited_design(corpus.n_chunks, options)
        k, d = choose_design(corpus.n_chunks, design, model.most_subsets)
        writer.commit(asdict(progress))
        append_design(writer, corpus.n_chunks, n_subsets=k, degree=d, seed=options.seed)
        writer.publish(
            {
                "seed": options.seed,
                "n_subsets": k,
                "degree": d,
                "design": "regular",
                "block_size": block_size,
                "fingerprints": {"corpus": progress.digest, **model.fingerprints},
                "model_path": recorded_model(model.path, out),
                "config": recorded_config(sources, out, settings, reading),
                "counts": _counts(corpus, progress, skipped=log.skipped),
                "created_by": f"stride {__version__}",
            }
        )
    remember_model(model)
    return Index.open(out)


def settings_of_build(model: IndexedModel, options: BuildOptions, block_size: int) -> dict[str, Any]:
    """All that decides an index beside its corpus."""
    settings = {
        "format_version": FORMAT_VERSION,
        **model.fingerprints,
        "block_size": block_size,
        "n_subsets": options.n_subsets,
        "degree": options.degree,
        "seed": options.seed,
        "store_text": options.store_text,
    }
    if options.n_subsets is None and model.most_subsets is not None:
        settings["most_subsets"] = model.most_subsets
    return settings


def recorded_config(
    sources: Sequence[str], out: str | Path, settings: Mapping[str, Any], reading: ReadOptions
) -> dict[str, Any]:
    """What an index records of how it was built."""
    return {"sources": _recorded(sources, out), **settings, "reading": asdict(reading)}


def remember_model(model: IndexedModel) -> None:
    """Keep in mind where a model is, for copies of the index alone."""
    if model.path is not None and Path(model.path).exists():
        remember("places", model.fingerprint, str(Path(model.path).absolute()))


def append_to_index(
    path: str | Path,
    sources: Sequence[str],
    *,
    tokenizer: Any,
    tokenizer_fingerprint: str,
    reading: ReadOptions = ReadOptions(),
    commit_seconds: float = BuildOptions.commit_seconds,
    grown: bool = False,
) -> Index:
    """Add documents to an index: what is there stays, and K, and operators (their coverage falls).

    The new index takes the old one's place at once, when it is complete; interrupted, it resumes as a build
    does. The result has the same corpus and design as one build of both corpora with the same K, d and seed.

    Parameters
    ----------
    grown : bool
        The sources begin with the documents that the index has (see `compare_corpus`); those after them are
        added.

    Raises
    ------
    IndexMismatch
        Another tokenizer than the index's.
    CorpusError
        As `build_index`; also an id that the index has already.
    """
    index = Index.open(local_directory(path))
    index.check_fingerprint("tokenizer", tokenizer_fingerprint)
    attributes = dict(index.attributes)
    chunker = DocumentTokenizer(tokenizer, block_size=attributes["block_size"])
    store_text = index.has("corpus/text_bytes")
    first = 0 if grown else index.n_documents
    sources = [pinned(source) for source in sources]
    documents, log = open_documents(
        sources,
        reading,
        known_ids=(index.document_id(document) for document in range(first)),
        first_number=first,
        scratch=Path(path).absolute().parent,
    )
    if grown:
        documents = itertools.islice(documents, index.n_documents, None)
    counts = attributes.get("counts") or {}
    fingerprint = attributes["fingerprints"]["corpus"]
    start = _Progress(
        documents=index.n_documents,
        digest=fingerprint,
        scored_tokens=counts.get("scored_tokens", 0),
        unscored_documents=counts.get("unscored_documents", 0),
        conversations=counts.get("conversations", 0),
    )
    seed, k, d = index.seed, index.n_subsets, index.degree
    key = settings_key(
        {"append_to": fingerprint, "build_key": attributes.get("build_key"), "reading": asdict(reading)}
    )
    del index
    with storage_errors(path), IndexWriter.extend(path, build_key=key) as writer:
        corpus = _Corpus(writer, chunker, store_text=store_text)
        progress = corpus.add(documents, log, start, commit_seconds)
        writer.commit(asdict(progress))
        append_design(writer, corpus.n_chunks, n_subsets=k, degree=d, seed=seed)
        attributes["fingerprints"] = {**attributes["fingerprints"], "corpus": progress.digest}
        attributes["counts"] = _counts(
            corpus, progress, skipped=log.skipped + counts.get("skipped_records", 0)
        )
        if (
            "conversations" not in counts
        ):  # of 0.2 and before, which did not count them: nobody knows how many
            del attributes["counts"]["conversations"]
        config = dict(attributes.get("config") or {})
        config["appended"] = [
            *config.get("appended", []),
            {
                "sources": _recorded(sources, path),
                "reading": asdict(reading),
                "first_document": start.documents,
            },
        ]
        attributes["config"] = config
        attributes["created_by"] = f"stride {__version__}"
        writer.publish(attributes)
    return Index.open(path)


def compare_corpus(
    index: Index, sources: Sequence[str], reading: ReadOptions = ReadOptions()
) -> tuple[str, int]:
    """What has become of an index's corpus: ("same", "grown" or "other", documents found).

    "grown": it begins with the documents that the index has, and others follow. Files that are as they were
    when this was last asked (of the same size, and not written since) are not read again.

    Raises
    ------
    CorpusError      it cannot be read
    """
    files = [Path(source.path) for source in find_sources(sources) if source.path is not None]
    state = [(str(path.absolute()), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    known = settings_key({"index": index.digest, "files": state, "reading": asdict(reading)})
    if recall("corpora", known) is not None:
        return "same", index.n_documents
    documents, log = open_documents(sources, reading)
    digest, count, begins, ends = EMPTY_CORPUS, 0, False, _ends_of_parts(index)
    with output.progress("comparing the corpus with its index", _megabytes(log), unit="MB") as ticker:
        done = 0.0
        for document in documents:
            digest = document.digest(digest)
            count += 1
            if count in ends:
                # each part has a chain of its own; that of a part that differs leads nowhere
                ends[count] = digest.hex()
                digest = merged_digest(list(ends.values())) if count == max(ends) else EMPTY_CORPUS
            if count == index.n_documents:
                begins = digest.hex() == index.attributes["fingerprints"]["corpus"]
            ticker.advance(log.bytes_done / 1e6 - done)
            done = log.bytes_done / 1e6
    if not begins:
        return "other", count
    if count > index.n_documents:
        return "grown", count
    remember("corpora", known, str(index.path))
    return "same", count


def _ends_of_parts(index: Index) -> dict[int, str]:
    """Of an index whose fingerprint is made of those of its parts (`documents.merged_digest`): where each
    ends, in documents, and its fingerprint."""
    config = index.attributes.get("config") or {}
    if config.get("merged_exactly", True):
        return {}
    appended = config.get("appended") or [{"first_document": index.n_documents}]
    begins = [part["first_document"] for part in config["merged"]] + [appended[0]["first_document"]]
    return dict(zip(begins[1:], (part["corpus"] for part in config["merged"]), strict=True))


def survey_corpus(
    sources: Sequence[str],
    *,
    tokenizer: Any,
    block_size: int = DEFAULT_BLOCK_SIZE,
    reading: ReadOptions = ReadOptions(),
) -> CorpusCounts:
    """The size that a corpus will have in an index, found by tokenising it; nothing is written."""
    chunker = DocumentTokenizer(tokenizer, block_size=block_size)
    documents, log = open_documents(sources, reading)
    counts = CorpusCounts(documents=0, chunks=0, tokens=0)
    with output.progress("tokenising", _megabytes(log), unit="MB") as ticker:
        done = 0.0
        for batch in _encode_ahead(chunker, documents):
            blocks = chunker.cut(batch)
            counts = CorpusCounts(
                documents=counts.documents + len(batch),
                chunks=counts.chunks + len(blocks.lengths),
                tokens=counts.tokens + len(blocks.tokens),
                id_bytes=counts.id_bytes + sum(len(each.document.id.encode()) for each in batch),
                text_bytes=counts.text_bytes + sum(len(each.document.plain_text.encode()) for each in batch),
                needs_mask=counts.needs_mask or bool(blocks.loss_masks),
            )
            ticker.advance(log.bytes_done / 1e6 - done)
            done = log.bytes_done / 1e6
    return counts


class _Corpus:
    """The corpus arrays of an index that is being written."""

    def __init__(self, writer: IndexWriter, chunker: DocumentTokenizer, *, store_text: bool) -> None:
        self._writer = writer
        self._chunker = chunker
        self._store_text = store_text

    @property
    def n_chunks(self) -> int:
        return self._writer.length("corpus/chunk_document")

    @property
    def n_documents(self) -> int:
        return max(0, self._writer.length("corpus/document_offsets") - 1)

    @property
    def n_tokens(self) -> int:
        return self._writer.length("corpus/tokens")

    def add(
        self, documents: Iterator[Document], log: ReadLog, start: _Progress, commit_seconds: float
    ) -> _Progress:
        """Append documents after those that earlier commits hold, committing as it goes (not the last ones).

        `documents` starts with the first document after `start`, whatever was committed since.
        """
        if not self._writer.length("corpus/chunk_offsets"):
            for name in ("chunk_offsets", "document_offsets"):
                self._writer.append(f"corpus/{name}", np.zeros(1, np.int64))
        progress = start
        if self._writer.state is not None:
            progress = _Progress(**self._writer.state)
            self._skip(documents, start, progress)
        with output.progress("tokenising", _megabytes(log), unit="MB") as ticker:
            last = time.monotonic()
            wait = commit_seconds
            done = 0.0
            try:
                for batch in _encode_ahead(self._chunker, documents):
                    progress = self._append(batch, progress)
                    now = time.monotonic()
                    if now - last >= wait:
                        self._writer.commit(asdict(progress))
                        last = time.monotonic()
                        wait = max(commit_seconds, (last - now) / _COMMIT_SHARE) if commit_seconds else 0
                    ticker.advance(log.bytes_done / 1e6 - done)
                    done = log.bytes_done / 1e6
            except CorpusError:
                if self._writer.state is not None:
                    output.note(
                        f"{self._writer.state['documents']:,} documents are kept in "
                        f"{self._writer.path}.partial; once the corpus is corrected behind them, the same "
                        "command goes on from there"
                    )
                raise
        return progress

    def _skip(self, documents: Iterator[Document], start: _Progress, committed: _Progress) -> None:
        """Read over the documents that the interrupted build committed, and make sure they are the same."""
        count = committed.documents - start.documents
        digest = bytes.fromhex(start.digest)
        found = 0
        for document in itertools.islice(documents, count):
            digest = document.digest(digest)
            found += 1
        if found < count or digest.hex() != committed.digest:
            what = f"only {found:,} documents" if found < count else "other documents"
            raise CorpusError(
                f"the corpus has changed since the build at {self._writer.path} was interrupted: expected "
                f"its first {count:,} documents again, found {what}",
                fix="give the same corpus to resume, or start afresh with --overwrite",
            )

    def _append(self, batch: Sequence[Encoded], progress: _Progress) -> _Progress:
        digest = bytes.fromhex(progress.digest)
        for encoded in batch:
            digest = encoded.document.digest(digest)
        blocks = self._chunker.cut(batch)
        self._append_masks(blocks)
        write = self._writer.append
        write("corpus/chunk_offsets", self.n_tokens + np.cumsum(blocks.lengths))
        owners = np.arange(self.n_documents, self.n_documents + len(batch))
        write("corpus/document_offsets", self.n_chunks + np.cumsum(blocks.chunks_of))
        write("corpus/chunk_document", owners.repeat(blocks.chunks_of))
        write("corpus/loss_start", blocks.loss_starts)
        if len(blocks.lengths):
            write("corpus/tokens", blocks.tokens)
        self._writer.append_strings("corpus/document_id", [encoded.document.id for encoded in batch])
        if self._store_text:
            self._writer.append_strings("corpus/text", [encoded.document.plain_text for encoded in batch])
        return replace(
            progress,
            documents=progress.documents + len(batch),
            digest=digest.hex(),
            scored_tokens=progress.scored_tokens + int(blocks.scored_of.sum()),
            unscored_documents=progress.unscored_documents + int((blocks.scored_of == 0).sum()),
            conversations=progress.conversations + sum(each.document.text is None for each in batch),
        )

    def _append_masks(self, blocks: Blocks) -> None:
        """Masks of chunks about to be appended; the array begins with the first chunk that needs one."""
        begun = self._writer.length("corpus/loss_mask") > 0
        if not begun:
            if not blocks.loss_masks:
                return
            self._append_earlier_masks()
        masks = suffix_masks(blocks.lengths, blocks.loss_starts.astype(np.int64))
        ends = np.cumsum(blocks.lengths)
        for number, mask in blocks.loss_masks.items():
            masks[ends[number] - len(mask) : ends[number]] = mask
        self._writer.append("corpus/loss_mask", masks)

    def _append_earlier_masks(self) -> None:
        read = self._writer.read
        for first in range(0, self.n_chunks, _MASK_BLOCK):
            last = min(first + _MASK_BLOCK, self.n_chunks)
            lengths = np.diff(read("corpus/chunk_offsets", first, last + 1))
            starts = read("corpus/loss_start", first, last).astype(np.int64)
            self._writer.append("corpus/loss_mask", suffix_masks(lengths, starts))


def suffix_masks(lengths: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """1 from each chunk's start to its end: (sum of lengths,) uint8."""
    begins = np.cumsum(lengths) - lengths
    positions = np.arange(int(lengths.sum())) - np.repeat(begins, lengths)
    return (positions >= np.repeat(starts, lengths)).astype(np.uint8)


def append_design(writer: IndexWriter, n_chunks: int, *, n_subsets: int, degree: int, seed: int) -> None:
    """The design of all chunks that have none yet, and its transpose anew; blockwise.

    Nothing is committed: it takes seconds, and a resumed build makes it again from (seed, chunk number).
    """
    with output.progress("drawing subsets", n_chunks, unit="chunks") as ticker:
        for start in range(writer.length("design/columns"), n_chunks, _DESIGN_BLOCK):
            stop = min(start + _DESIGN_BLOCK, n_chunks)
            columns = build_columns(start, stop, n_subsets=n_subsets, degree=degree, seed=seed)
            writer.append("design/columns", columns)
            ticker.advance(stop - start)
    writer.append_rows_of_design(n_subsets)


def _batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    """Lists of documents, up to about a million characters each: enough to keep every core tokenising."""
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document.plain_text)
        if size >= _BATCH_CHARACTERS or len(batch) >= _BATCH_DOCUMENTS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _encode_ahead(chunker: DocumentTokenizer, documents: Iterator[Document]) -> Iterator[list[Encoded]]:
    """Tokenised batches; the next one is tokenised while the caller writes this one to disk."""
    with ThreadPoolExecutor(1) as pool:
        pending = None
        for batch in _batches(documents):
            following = pool.submit(chunker.encode_batch, batch)
            if pending is not None:
                yield pending.result()
            pending = following
        if pending is not None:
            yield pending.result()


def _counts(corpus: _Corpus, progress: _Progress, *, skipped: int) -> dict[str, int]:
    return {
        "documents": corpus.n_documents,
        "chunks": corpus.n_chunks,
        "tokens": corpus.n_tokens,
        "scored_tokens": progress.scored_tokens,
        "unscored_documents": progress.unscored_documents,
        "conversations": progress.conversations,
        "skipped_records": skipped,
    }


def recorded_model(path: str | None, index: str | Path) -> str | None:
    """The model's path as an index records it."""
    local = path is not None and Path(path).exists()
    return recorded_path(path, index) if path is not None and local else path


def _recorded(sources: Sequence[str], index: str | Path) -> list[str]:
    return [
        source if source == "-" or is_hub_address(source) else recorded_path(source, index)
        for source in sources
    ]


def settings_key(settings: dict[str, Any]) -> str:
    """The build key of what determines an index: SHA-256 in hex."""
    text = json.dumps(settings, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _megabytes(log: ReadLog) -> float | None:
    return None if log.bytes_total is None else log.bytes_total / 1e6


class storage_errors:
    """Turns what the operating system refuses at the index's place into a StorageError."""

    def __init__(self, out: str | Path) -> None:
        self._out = out

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        # read errors of a corpus are CorpusErrors by now; a broken pipe is the terminal's
        if isinstance(error, OSError) and not isinstance(
            error, IndexFormatError | BrokenPipeError | StorageError
        ):
            raise StorageError(
                f"{self._out}: cannot be written: {error.strerror or error}",
                fix="check the directory's permissions and the disk; the same command resumes",
            ) from error
