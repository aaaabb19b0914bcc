"""Build an index and extend it: documents in, chunks and subsets out.

A build streams. Documents are read (`readers`), tokenised and cut (`chunking`), appended to the arrays of the
corpus, and committed every few seconds. Then the subsets are drawn, and the index appears by one rename.
After a kill the same call reads over the committed documents, compares their digest, and goes on.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from index_format.design import build_columns
from index_format.durable import require_space
from index_format.errors import IndexFormatError
from index_format.layout import FORMAT_VERSION, partial_path
from index_format.location import local_directory
from index_format.reader import Index
from index_format.shards import ranges
from index_format.writer import IndexWriter
from stride_cli import output
from stride_cli.corpus.chunking import Blocks, DocumentTokenizer
from stride_cli.corpus.documents import EMPTY_CORPUS, bad, chained, listed, merged_digest
from stride_cli.corpus.forms import Form, unprinted
from stride_cli.corpus.options import DEFAULT_BLOCK_SIZE, BuildOptions, Range
from stride_cli.corpus.plan import CorpusCounts, choose_block_size, choose_design, limited_design
from stride_cli.corpus.readers import Document, ReadOptions, open_documents
from stride_cli.corpus.sources import ReadLog, find_sources, pinned
from stride_cli.corpus.summary import disk_bytes
from stride_cli.errors import CorpusError, StorageError
from stride_cli.hub import HUB
from stride_cli.parallel import Workers
from stride_cli.remembered import recall, recorded_path, remember
from stride_cli.version import __version__

_COMMIT_SHARE = 0.05  # of the time; on a slow or busy disk commits are further apart
# of a batch: enough to keep every core tokenising
_BATCH_DOCUMENTS = 256
_BATCH_CHARACTERS = 1 << 20
# bytes of an index for one of its corpus; of a packed corpus it is more, which nobody knows beforehand
_WITH_TEXT, _TOKENS = 1.5, 0.6
_BLOCK_WIDTH = 16  # numbers of a chunk, for blocks of 65,536 chunks
_COUNTED = ("scored_tokens", "unscored_documents", "unscored_chunks", "conversations")

Batch = tuple[list[Document], Blocks]
Item = TypeVar("Item")


@dataclass(frozen=True)
class IndexedModel:
    """The model that an index is built for.

    Attributes:
        tokenizer: The checkpoint's own (transformers).
        tokenizer_fingerprint, fingerprint: Recorded; a query against another model or tokenizer is refused.
        path: Recorded as the default model of later commands: a hub id, or a path as seen from the index.
        context: Its longest sequence in tokens, which no chunk exceeds.
        settings_fingerprint: Recorded, and compared as the others are.
        most_subsets: K at most, where none is asked for (`gate_budget`).
        form: That its training had, as a recorded run says; None: by the options.
        vocabulary: Tokens that it has rows for; None: unknown.
    """

    tokenizer: Any
    tokenizer_fingerprint: str
    fingerprint: str
    path: str | None = None
    context: int | None = None
    settings_fingerprint: str | None = None
    most_subsets: int | None = None
    form: Form | None = None
    vocabulary: int | None = None

    @property
    def fingerprints(self) -> dict[str, str]:
        """Fingerprints by the names under which an index records them."""
        found = {"tokenizer": self.tokenizer_fingerprint, "model": self.fingerprint}
        return found | ({"settings": self.settings_fingerprint} if self.settings_fingerprint else {})


@dataclass(frozen=True, slots=True)
class _Progress:
    """The state of a commit: documents in the index, their chained digest, and counts."""

    documents: int = 0
    digest: str = EMPTY_CORPUS
    scored_tokens: int = 0
    unscored_documents: int = 0
    unscored_chunks: int = 0
    conversations: int = 0

    def after(self, documents: Sequence[Document], blocks: Blocks) -> _Progress:
        """Count a batch, and chain its documents to the digest."""
        return _Progress(
            documents=self.documents + len(documents),
            digest=chained(self.digest, documents),
            scored_tokens=self.scored_tokens + int(blocks.scored_of.sum()),
            unscored_documents=self.unscored_documents + int((blocks.scored_of == 0).sum()),
            unscored_chunks=self.unscored_chunks + int((blocks.loss_starts == blocks.lengths).sum()),
            conversations=self.conversations + sum(document.text is None for document in documents),
        )


def build_index(
    sources: Sequence[str],
    model: IndexedModel,
    out: str | Path,
    options: BuildOptions = BuildOptions(),
    reading: ReadOptions = ReadOptions(),
) -> Index:
    """Read a corpus, chunk it, draw its subsets and publish the index at `out`.

    An interrupted build (even by kill -9) goes on at its last commit when it is called again with the same
    corpus and settings. The bytes are those of an uninterrupted build, whatever the number of workers.

    Args:
        sources: As for `read_documents`.
        model: Its tokenizer makes the tokens.
        options: Chunks, design, and how the build proceeds.
        reading: Names of fields, and treatment of bad records.

    Raises:
        CorpusError: A record cannot be used, the corpus is smaller than K, or it has changed since the
            interrupted build.
        UsageError: Chunks are longer than the model's context, or the degree exceeds the chunks.
        IndexFormatError: `out` exists, is being built by another process, or holds an unfinished build of
            other settings.
        StorageError: The disk refuses.
    """
    block_size = choose_block_size(options.block_size, model.context)
    form = model.form or Form.choose(model.tokenizer, options.form)
    skip = reading.on_bad == "skip"
    chunker = DocumentTokenizer(
        model.tokenizer, block_size=block_size, form=form, skip=skip, vocabulary=model.vocabulary
    )
    local_directory(out)
    sources = [pinned(source) for source in sources]
    part = None if options.range is None else Range.parse(options.range)
    # before anything is created, so that a missing file leaves nothing behind
    documents, log = open_documents(sources, reading, scratch=Path(out).absolute().parent, part=part)
    settings = _settings(model, options, block_size, form)
    local = Path(model.path) if model.path is not None and Path(model.path).exists() else None
    key = settings_key(settings)
    with storage_errors(out), IndexWriter.create(out, build_key=key, overwrite=options.overwrite) as writer:
        n_bytes = round((log.bytes_total or 0) * (_WITH_TEXT if options.store_text else _TOKENS))
        there = disk_bytes(partial_path(Path(out)) / "data") or 0
        require_space(Path(out).absolute().parent, n_bytes - there, what=f"building {out}")
        progress = _write_corpus(writer, chunker, documents, log, _Progress(), options)
        n_chunks = writer.length("corpus/chunk_document")
        # a range is an index only to be looked at: `merge` draws the subsets of all chunks anew
        design = options if part is None else limited_design(n_chunks, options)
        k, d = choose_design(n_chunks, design, model.most_subsets)
        writer.commit(asdict(progress))
        append_design(writer, n_chunks, n_subsets=k, degree=d, seed=options.seed)
        writer.publish(
            {
                "seed": options.seed,
                "n_subsets": k,
                "degree": d,
                "design": "regular",
                "block_size": block_size,
                "fingerprints": {"corpus": progress.digest, **model.fingerprints, "form": form.fingerprint},
                "form": asdict(form),
                "model_path": recorded_path(local, out) if local else model.path,
                "config": settings | _config(sources, out, reading),
                "counts": _counts(writer, progress, skipped=log.skipped),
                "created_by": f"stride {__version__}",
            }
        )
    if local is not None:  # for copies of the index alone
        remember("places", model.fingerprint, str(local.absolute()))
    return Index.open(out)


def _settings(model: IndexedModel, options: BuildOptions, block_size: int, form: Form) -> dict[str, Any]:
    """Everything but the corpus that determines an index."""
    settings = {
        "format_version": FORMAT_VERSION,
        **model.fingerprints,
        "block_size": block_size,
        "n_subsets": options.n_subsets,
        "degree": options.degree,
        "seed": options.seed,
        "store_text": options.store_text,
        "form": asdict(form),
    }
    if options.n_subsets is None and model.most_subsets is not None:
        settings["most_subsets"] = model.most_subsets
    if options.range is not None:
        settings["range"] = str(Range.parse(options.range))
    return settings


def append_to_index(
    path: str | Path,
    sources: Sequence[str],
    *,
    tokenizer: Any,
    tokenizer_fingerprint: str,
    vocabulary: int | None = None,
    reading: ReadOptions = ReadOptions(),
    commit_seconds: float = BuildOptions.commit_seconds,
    grown: bool = False,
) -> Index:
    """Add documents to an index; its chunks, K and operators stay (the operators' coverage falls).

    The new index takes the old one's place at once when it is complete; interrupted, it resumes as a build
    does. Corpus and design are those of one build of both corpora with the same K, d and seed.

    Args:
        vocabulary: As of `IndexedModel`.
        grown: The sources begin with the documents of the index (`compare_corpus`); the others are added.

    Raises:
        IndexMismatch: The tokenizer is not the index's.
        CorpusError: As `build_index`; or the index has an id already.
    """
    index = Index.open(local_directory(path))
    index.check_fingerprint("tokenizer", tokenizer_fingerprint)
    attributes = dict(index.attributes)
    counts = attributes.get("counts") or {}
    corpus = attributes["fingerprints"]["corpus"]
    seed, k, d = index.seed, index.n_subsets, index.degree
    start = _Progress(
        documents=index.n_documents, digest=corpus, **{name: counts.get(name, 0) for name in _COUNTED}
    )
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
    form, skip = Form.recorded(attributes), reading.on_bad == "skip"
    chunker = DocumentTokenizer(
        tokenizer, block_size=attributes["block_size"], form=form, skip=skip, vocabulary=vocabulary
    )
    options = BuildOptions(store_text=index.has("corpus/text_bytes"), commit_seconds=commit_seconds)
    about = {"append_to": corpus, "build_key": attributes.get("build_key"), "reading": asdict(reading)}
    del index
    with storage_errors(path), IndexWriter.extend(path, build_key=settings_key(about)) as writer:
        progress = _write_corpus(writer, chunker, documents, log, start, options)
        writer.commit(asdict(progress))
        append_design(writer, writer.length("corpus/chunk_document"), n_subsets=k, degree=d, seed=seed)
        skipped = log.skipped + (0 if grown else counts.get("skipped_records", 0))
        attributes["fingerprints"] = {**attributes["fingerprints"], "corpus": progress.digest}
        attributes["counts"] = _counts(writer, progress, skipped=skipped)
        if "conversations" not in counts:  # stride 0.2 did not count them
            del attributes["counts"]["conversations"]
        config = attributes.get("config") or {}
        appended = _config(sources, path, reading) | {"first_document": start.documents}
        attributes["config"] = config | {"appended": [*config.get("appended", []), appended]}
        attributes["created_by"] = f"stride {__version__}"
        writer.publish(attributes)
    return Index.open(path)


# Documents -> chunks -> arrays


def _write_corpus(
    writer: IndexWriter,
    chunker: DocumentTokenizer,
    documents: Iterator[Document],
    log: ReadLog,
    start: _Progress,
    options: BuildOptions,
) -> _Progress:
    """Append all documents, committing as it goes (not the last ones).

    `documents` begin with the first one after `start`, whatever was committed since.
    """
    progress = start
    if writer.state is not None:
        progress = _Progress(**writer.state)
        # the documents that are committed are read over, and have to be the same
        count = progress.documents - start.documents
        if chained(start.digest, itertools.islice(documents, count)) != progress.digest:
            place = f"the corpus has changed since the build at {writer.path} was interrupted"
            fix = "give the same corpus to resume, or start afresh with --overwrite"
            raise bad(place, f"its first {count:,} documents again", "others or fewer", fix)
    last, wait = time.monotonic(), options.commit_seconds
    silent: Counter[str] = Counter()
    try:
        for batch, blocks in _with_progress(tokenised(chunker, documents, options), log):
            _append(writer, batch, blocks, store_text=options.store_text)
            progress = progress.after(batch, blocks)
            silent.update(unprinted(chunker.tokenizer, chunker.form, batch))
            now = time.monotonic()
            if now - last >= wait:
                writer.commit(asdict(progress))
                last = time.monotonic()
                wait = max(options.commit_seconds, (last - now) / _COMMIT_SHARE) if wait else 0
    except CorpusError:
        if writer.state is not None:
            output.note(
                f"{writer.state['documents']:,} documents are kept in {writer.path}.partial; once the corpus "
                "is corrected behind them, the same command goes on from there"
            )
        raise
    for name, count in silent.items():
        output.note(f"{listed([name])} of {count:,} messages is in no token: the form does not print it")
    return progress


def tokenised(
    chunker: DocumentTokenizer, documents: Iterator[Document], options: BuildOptions = BuildOptions()
) -> Iterator[Batch]:
    """Yield batches of documents, in order, with their chunks.

    The next batch is tokenised while the caller writes this one; with workers, many are.
    """
    waiting: deque[list[Document]] = deque()

    def tasks() -> Iterator[list[Document]]:
        for batch in _batches(documents):
            waiting.append(batch)
            yield batch

    if options.engine != "local" or (options.workers or 1) > 1:
        with Workers(chunker.chunks_of, options.workers, engine=options.engine) as workers:
            for blocks in workers.in_order(tasks()):
                yield waiting.popleft(), blocks
        return
    with ThreadPoolExecutor(1) as pool:
        running = (pool.submit(chunker.chunks_of, batch) for batch in tasks())
        # pairs, so that the next one runs before the result of this one is waited for
        for this, _ in itertools.pairwise(itertools.chain(running, [None])):
            assert this is not None
            yield waiting.popleft(), this.result()


def _batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
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


def _with_progress(items: Iterator[Item], log: ReadLog, doing: str = "tokenising") -> Iterator[Item]:
    """Show how many megabytes of the sources are read."""
    total = None if log.bytes_total is None else log.bytes_total / 1e6
    with output.progress(doing, total, unit="MB") as ticker:
        for item in items:
            yield item
            ticker.reach(log.bytes_done / 1e6)


def _append(writer: IndexWriter, documents: list[Document], blocks: Blocks, *, store_text: bool) -> None:
    """Append documents and their chunks to the arrays of corpus/."""
    write, length = writer.append, writer.length
    if not length("corpus/chunk_offsets"):
        for name in ("chunk_offsets", "document_offsets"):
            write(f"corpus/{name}", np.zeros(1, np.int64))
    n_documents = length("corpus/document_offsets") - 1
    n_chunks, n_tokens = length("corpus/chunk_document"), length("corpus/tokens")
    # 1. masks begin with the first chunk whose scored tokens are no suffix; all chunks before it get one then
    begun = length("corpus/loss_mask") > 0
    if blocks.loss_masks and not begun:
        append_suffix_masks(writer, 0, n_chunks)
    if blocks.loss_masks or begun:
        masks = _suffix_masks(blocks.lengths, blocks.loss_starts)
        ends = np.cumsum(blocks.lengths)
        for number, mask in blocks.loss_masks.items():
            masks[ends[number] - len(mask) : ends[number]] = mask
        write("corpus/loss_mask", masks)
    # 2. chunks: where each begins, its document, its first scored token
    write("corpus/chunk_offsets", n_tokens + np.cumsum(blocks.lengths))
    owners = np.arange(n_documents, n_documents + len(documents))
    write("corpus/document_offsets", n_chunks + np.cumsum(blocks.chunks_of))
    write("corpus/chunk_document", owners.repeat(blocks.chunks_of))
    write("corpus/loss_start", blocks.loss_starts)
    if len(blocks.lengths):
        write("corpus/tokens", blocks.tokens)
    # 3. documents
    writer.append_strings("corpus/document_id", [document.id for document in documents])
    append_titles(writer, n_documents, [document.title for document in documents])
    if store_text:
        writer.append_strings("corpus/text", [document.plain_text for document in documents])


def append_titles(writer: IndexWriter, before: int, titles: list[str]) -> None:
    """Append titles of documents from the first title on; the documents before these have empty ones."""
    begun = writer.length("corpus/title_offsets") > 0
    if any(titles) and not begun:
        writer.append("corpus/title_offsets", np.zeros(before + 1, np.int64))
    if any(titles) or begun:
        writer.append_strings("corpus/title", titles)


def append_suffix_masks(writer: IndexWriter, start: int, stop: int) -> None:
    """Append the masks of chunks start … stop-1, whose scored tokens are those from their `loss_start` on."""
    for first, last in ranges(stop, start, width=_BLOCK_WIDTH):
        lengths = np.diff(writer.read("corpus/chunk_offsets", first, last + 1))
        starts = writer.read("corpus/loss_start", first, last)
        writer.append("corpus/loss_mask", _suffix_masks(lengths, starts))


def _suffix_masks(lengths: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Return 1 from each chunk's start to its end: (sum of lengths,) uint8."""
    begins = np.cumsum(lengths) - lengths
    positions = np.arange(int(lengths.sum())) - np.repeat(begins, lengths)
    return (positions >= np.repeat(starts.astype(np.int64), lengths)).astype(np.uint8)


def append_design(writer: IndexWriter, n_chunks: int, *, n_subsets: int, degree: int, seed: int) -> None:
    """Draw the subsets of all chunks that have none yet, blockwise, and sum up their sizes.

    Nothing is committed: it takes seconds, and a resumed build draws the same from (seed, chunk number).
    """
    with output.progress("drawing subsets", n_chunks, unit="chunks") as ticker:
        for start, stop in ranges(n_chunks, writer.length("design/columns"), width=_BLOCK_WIDTH):
            columns = build_columns(start, stop, n_subsets=n_subsets, degree=degree, seed=seed)
            writer.append("design/columns", columns)
            ticker.advance(stop - start)
    writer.append_row_offsets(n_subsets)


# Comparing and counting without writing


def compare_corpus(
    index: Index, sources: Sequence[str], reading: ReadOptions = ReadOptions()
) -> tuple[str, int]:
    """Compare a corpus with an index's: ("same", "grown" or "other", documents found).

    "grown": the corpus begins with the documents of the index, and others follow. Files whose size and time
    of change are those of the last comparison are not read again.

    Raises:
        CorpusError: The corpus cannot be read.
    """
    files = [Path(source.path) for source in find_sources(sources) if source.path is not None]
    state = [(str(path.absolute()), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    known = settings_key({"index": index.digest, "files": state, "reading": asdict(reading)})
    if recall("corpora", known) is not None:
        return "same", index.n_documents
    documents, log = open_documents(sources, reading)
    read = _with_progress(documents, log, "comparing the corpus with its index")
    counter = itertools.count()
    found, sizes = (each for each, _ in zip(read, counter, strict=False)), _sizes_of_parts(index)
    # each part has a chain of its own, and its numbers; what was appended goes on from the digest of all
    pieces = (enumerate(itertools.islice(found, size)) for size in sizes)
    own = (
        (replace(each, id=str(n)) if reading.number_ids else each for n, each in piece) for piece in pieces
    )
    parts = [chained(EMPTY_CORPUS, piece) for piece in own]
    start = merged_digest(parts) if parts else EMPTY_CORPUS
    digest = chained(start, itertools.islice(found, index.n_documents - sum(sizes)))
    deque(found, maxlen=0)  # reads the others
    count = next(counter)
    if digest != index.attributes["fingerprints"]["corpus"]:
        return "other", count
    if count > index.n_documents:
        return "grown", count
    remember("corpora", known, str(index.path))
    return "same", count


def difference(index: Index, sources: Sequence[str], reading: ReadOptions = ReadOptions()) -> str:
    """Say how a corpus differs from an index's: which documents are changed, gone or new.

    Raises:
        CorpusError: The corpus cannot be read.
    """
    numbers = {index.document_id(number): number for number in range(index.n_documents)}
    changed, new = [], []
    for document in open_documents(sources, reading)[0]:
        number = numbers.pop(document.id, None)
        if number is None:
            new.append(document.id)
        elif (text := index.document_text(number)) is not None and text != document.plain_text:
            changed.append(document.id)
    found = (("changed", changed), ("gone", [*numbers]), ("new", new))
    told = (f"{len(ids):,} {what} ({listed(ids[:2])}{', …' * (len(ids) > 2)})" for what, ids in found if ids)
    return ", ".join(told) or "the same ones in another order, or roles of messages that differ"


def _sizes_of_parts(index: Index) -> list[int]:
    """Return the documents of each part of an index whose fingerprint is `merged_digest`; else nothing."""
    config = index.attributes.get("config") or {}
    if config.get("merged_exactly", True):
        return []
    appended = config.get("appended") or [{"first_document": index.n_documents}]
    begins = [part["first_document"] for part in (*config["merged"], appended[0])]
    return [after - first for first, after in itertools.pairwise(begins)]


def survey_corpus(
    sources: Sequence[str],
    *,
    tokenizer: Any,
    block_size: int = DEFAULT_BLOCK_SIZE,
    reading: ReadOptions = ReadOptions(),
) -> CorpusCounts:
    """Count what a corpus will have in an index, by tokenising it; nothing is written."""
    chunker = DocumentTokenizer(tokenizer, block_size=block_size, skip=reading.on_bad == "skip")
    documents, log = open_documents(sources, reading)
    counts = Counter[str]()
    for batch, blocks in _with_progress(tokenised(chunker, documents), log):
        counts.update(documents=len(batch), chunks=len(blocks.lengths), tokens=len(blocks.tokens))
        counts["masked_chunks"] += len(blocks.loss_masks)
        for name, of in (("id_bytes", "id"), ("title_bytes", "title"), ("text_bytes", "plain_text")):
            counts[name] += sum(len(getattr(each, of).encode()) for each in batch)
    return CorpusCounts(**counts)


# What an index records


def _counts(writer: IndexWriter, progress: _Progress, *, skipped: int) -> dict[str, int]:
    return {
        "documents": progress.documents,
        "chunks": writer.length("corpus/chunk_document"),
        "tokens": writer.length("corpus/tokens"),
        **{name: getattr(progress, name) for name in _COUNTED},
        "skipped_records": skipped,
    }


def _config(sources: Sequence[str], index: str | Path, reading: ReadOptions) -> dict[str, Any]:
    named = [each if each == "-" or each.startswith(HUB) else recorded_path(each, index) for each in sources]
    return {"sources": named, "reading": asdict(reading)}


def settings_key(settings: Mapping[str, Any]) -> str:
    """Return the build key of what determines an index: SHA-256 in hex."""
    text = json.dumps(settings, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


@contextmanager
def storage_errors(out: str | Path) -> Iterator[None]:
    """Turn what the operating system refuses at the index's place into a StorageError."""
    try:
        yield
    # a corpus' read errors are CorpusErrors by now; a broken pipe is the terminal's
    except (IndexFormatError, BrokenPipeError, StorageError):
        raise
    except OSError as error:
        fix = "give a place (no file) in a directory you may write to; the same command resumes"
        raise StorageError(f"{out}: cannot be written: {error.strerror or error}", fix=fix) from error
