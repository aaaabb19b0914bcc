"""Documents of a corpus, one by one, whatever file they come in; bad ones named by file and line."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stride_cli.corpus.documents import (
    FIX_OR_SKIP,
    Document,
    DocumentParser,
    Fields,
    Repeated,
    not_utf8,
    nul_found,
    too_long,
    type_name,
)
from stride_cli.corpus.ids import SeenIds
from stride_cli.corpus.ranges import Range, Share
from stride_cli.corpus.streams import (
    DamagedStream,
    ReadLog,
    Source,
    decompressed_bytes,
    find_sources,
    open_stream,
    read_lines,
    refuse_foreign,
    total_bytes,
    unreadable,
)
from stride_cli.corpus.tables import read_table
from stride_cli.errors import CorpusError, EmptyRange, StrideError, UsageError
from stride_cli.options import CORPUS, Options, option, own

__all__ = [
    "DEFAULT_MAX_DOCUMENT_BYTES",
    "Document",
    "Fields",
    "ReadOptions",
    "open_documents",
    "read_documents",
    "read_records",
]

DEFAULT_MAX_DOCUMENT_BYTES = 16 * 2**20
_BOM = b"\xef\xbb\xbf"
_TEXT_SUFFIXES = {".txt", ".text", ".md", ".rst", ".tex", ".html", ".htm", ".xml"}
# an object with a name twice is told apart
_DECODER = json.JSONDecoder(object_pairs_hook=Repeated.or_dict)


@dataclass(frozen=True)
class ReadOptions(Options):
    """How a corpus is read.

    Attributes
    ----------
    number_ids : number the documents and read no ids
    on_bad : what happens to a record that cannot be used; skipped ones are counted and told on stderr
    max_document_bytes : a line, text file or row of more bytes is bad; a line or file is never held whole
    fields : what the corpus calls its fields
    """

    number_ids: bool = option(False, "Number the documents instead of reading ids.", panel=CORPUS)
    on_bad: str = option(
        "error",
        "A bad record ends the build, or is skipped and told.",
        choices=("error", "skip"),
        listed=True,
        panel=CORPUS,
    )
    max_document_bytes: int = option(
        DEFAULT_MAX_DOCUMENT_BYTES, "Longest line, text file or row of a table.", low=1, panel=CORPUS
    )
    fields: Fields = field(default_factory=Fields)

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> ReadOptions:
        """From options by name, those of `Fields` among them."""
        return cls(**own(cls, given), fields=Fields(**own(Fields, given)))


def open_documents(
    sources: Sequence[str],
    options: ReadOptions,
    *,
    known_ids: Iterable[str] = (),
    first_number: int = 0,
    scratch: Path | None = None,
    part: Range | None = None,
) -> tuple[Iterator[Document], ReadLog]:
    """`read_documents`, and the log of the read."""
    log = ReadLog(options.on_bad)
    documents = read_documents(
        sources, options, known_ids=known_ids, first_number=first_number, scratch=scratch, log=log, part=part
    )
    return documents, log


def read_documents(
    sources: Sequence[str],
    options: ReadOptions = ReadOptions(),
    *,
    known_ids: Iterable[str] = (),
    first_number: int = 0,
    scratch: Path | None = None,
    log: ReadLog | None = None,
    part: Range | None = None,
) -> Iterator[Document]:
    """Stream the documents of a corpus in order.

    Parameters
    ----------
    sources : sequence of str
        Files (JSON Lines, Parquet, Arrow, plain text with one document a file; .gz and .zst of the first and
        last), globs, folders of Parquet or Arrow files or that `datasets` saved, ``hf://datasets/OWNER/NAME``
        (what is named here is fetched), `-`.
    options : ReadOptions
        What fields are called, and which records are bad.
    known_ids : iterable of str
        Ids already taken (by an index that is appended to).
    first_number : int
        Of the documents, where they are numbered.
    scratch : Path, optional
        Where the ids seen are kept when they are many; default: the system's temporary directory.
    log : ReadLog, optional
        Receives what is skipped and how far the read is; then `on_bad` is the log's.
    part : Range, optional
        Read this part alone; of compressed JSON Lines that it begins or ends in, what is before it is read
        over twice.

    Memory: one document, and up to 20,000 ids seen; more of them are on disk, some 40 bytes each.

    Raises
    ------
    CorpusError
        With file and line: broken JSON, not an object, missing or duplicate id, empty document, not UTF-8,
        a NUL, too long, a wrong type; a truncated archive. And: no such file, a pattern without a match, no
        document at all (of a part: `EmptyRange`).
    UsageError
        A part of what has no size: stdin, a pipe.
        Sources are looked up at the call, before the first document is asked for.
    """
    found = find_sources(sources)
    log = log if log is not None else ReadLog(options.on_bad)
    log.bytes_total = total_bytes(found)
    shares: list[Share | None] | None = None
    if part is not None:
        shares = part.shares(_sizes(found, part))
        log.bytes_total = sum(share.high - share.low for share in shares if share is not None)
    parser = DocumentParser(
        options.fields,
        options.max_document_bytes,
        options.number_ids,
        first_number,
        SeenIds(known_ids, scratch),
    )
    return _read(found, shares, parser, log)


def read_records(path: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """The objects of a file of JSON Lines (also .gz and .zst), each with its line, from 1.

    Raises
    ------
    CorpusError      no such file; with file and line: broken JSON, no object, not UTF-8, too long, damaged
    """
    (source,) = find_sources([path])
    try:
        with open_stream(source, ReadLog()) as stream:
            for number, line in read_lines(stream, DEFAULT_MAX_DOCUMENT_BYTES):
                if line is None:
                    raise too_long(f"{source.name}:{number}", DEFAULT_MAX_DOCUMENT_BYTES, "line")
                if number == 1:
                    refuse_foreign(line, source.name)
                line = line.removeprefix(_BOM)
                if line.strip():
                    yield number, _parse_json(line, source.name, number)
    except DamagedStream as error:
        raise _damaged(source, error) from None


def _sizes(sources: list[Source], part: Range) -> list[int]:
    """Bytes of every source on disk; UsageError where one has no size."""
    sizes = [total_bytes([source]) for source in sources]
    for source, size in zip(sources, sizes, strict=True):
        if size is None:
            raise UsageError(
                f"--range {part} is of files, and {source.name} is a stream: what it is part of is not known",
                fix="write it to a file first, or build without --range",
            )
    return [size for size in sizes if size is not None]


def _read(
    sources: list[Source], shares: list[Share | None] | None, parser: DocumentParser, log: ReadLog
) -> Iterator[Document]:
    count = 0
    try:
        for source, share in zip(sources, shares or [None] * len(sources), strict=True):
            if shares is not None and share is None:
                continue
            log.take(share)
            if share is not None and share.whole:
                share = None
            if source.kind in ("parquet", "arrow"):
                documents = read_table(source, parser, log, share)
            elif source.kind == "jsonl":
                documents = _read_jsonl(source, parser, log, share)
            elif share is None or share.low == 0:  # the file is one document, and begins here
                documents = _read_text(source, parser, log)
            else:
                continue
            for document in documents:
                count += 1
                yield document
    finally:
        log.finish()
    if count == 0:
        names = ", ".join(source.name for source in sources[:3]) + (", …" if len(sources) > 3 else "")
        skipped = f" ({log.skipped} bad records were skipped)" if log.skipped else ""
        if shares is not None:
            raise EmptyRange(
                f"{names}: expected at least one document in the range, found none{skipped}",
                fix="give --range of fewer parts: every part needs a document that begins in it",
            )
        raise CorpusError(
            f"{names}: expected at least one document, found none{skipped}",
            fix='give a file with lines such as {"id": "a", "text": "..."}',
        )


def _read_jsonl(
    source: Source, parser: DocumentParser, log: ReadLog, share: Share | None
) -> Iterator[Document]:
    try:
        first, stop = (0, None) if share is None else share.of(decompressed_bytes(source))
        with open_stream(source, log) as stream:
            for number, line in read_lines(stream, parser.max_bytes, first, stop):
                if number == 1 and line is not None:
                    refuse_foreign(line, source.name)
                where = f"{source.name}:{number}"
                try:
                    if line is None:
                        raise too_long(where, parser.max_bytes, "line")
                    # not of the first line alone: files are concatenated
                    line = line.removeprefix(_BOM)
                    if not line.strip():
                        continue
                    record = _parse_json(line, source.name, number)
                    document = parser.document(record, source.name, number)
                except CorpusError as error:
                    log.reject(error)
                    continue
                yield document
    except DamagedStream as error:
        raise _damaged(source, error) from None


def _read_text(source: Source, parser: DocumentParser, log: ReadLog) -> Iterator[Document]:
    try:
        with open_stream(source, log) as stream:
            data = stream.read(parser.max_bytes + 1)
    except DamagedStream as error:
        raise _damaged(source, error) from None
    except OSError as error:
        if isinstance(error, StrideError):
            raise
        raise unreadable(source.name, error, "read") from None
    try:
        if len(data) > parser.max_bytes:
            raise too_long(f"{source.name}:1", parser.max_bytes, "file")
        refuse_foreign(data, source.name)
        text = _decode(data.removeprefix(_BOM), source.name, 1)
        if source.path is not None and source.path.suffix.lower() not in _TEXT_SUFFIXES:
            _refuse_disguised_jsonl(text, source)
        document = parser.text_file(text, source.name)
    except CorpusError as error:
        log.reject(error)
        return
    yield document


def _parse_json(line: bytes, name: str, number: int) -> Mapping[str, Any]:
    where = f"{name}:{number}"
    text = _decode(line, name, number)
    try:
        record = _DECODER.decode(text)
    except (ValueError, RecursionError) as error:
        raise _broken_json(where, line, name, error) from None
    if not isinstance(record, dict):
        fix = FIX_OR_SKIP
        if isinstance(record, list):
            fix = "give one object a line: jq -c '.[]' FILE > FILE.jsonl"
        raise CorpusError(f"{where}: expected a JSON object on the line, found {type_name(record)}", fix=fix)
    return record


def _broken_json(where: str, line: bytes, name: str, error: Exception) -> CorpusError:
    fix = FIX_OR_SKIP
    if name.lower().endswith(".json"):
        fix = "give one object a line: jq -c '.[]? // .' FILE.json > FILE.jsonl"
    reason = str(error)
    if isinstance(error, json.JSONDecodeError):  # of this line, not of the file
        reason = f"{error.msg} at character {error.pos + 1}"
    if isinstance(error, RecursionError):
        reason = "nested too deeply"
    elif not isinstance(error, json.JSONDecodeError):  # Python's limit; its text names Python's remedy
        reason = "an integer of more than 4,300 digits"
    elif b"\r" in line.strip():
        reason += "; there are carriage returns inside the line"
        fix = "end lines in a line feed: tr '\\r' '\\n' < FILE > FILE.jsonl"
    return CorpusError(f"{where}: expected a JSON object on the line, found broken JSON: {reason}", fix=fix)


def _refuse_disguised_jsonl(text: str, source: Source) -> None:
    first = text.lstrip()[:1]
    if first != "{":
        return
    try:
        is_object = isinstance(_DECODER.decode(text.lstrip().split("\n", 1)[0]), dict)
    except (ValueError, RecursionError):
        return
    if is_object:
        raise CorpusError(
            f"{source.name}:1: expected plain text (one document a file), found JSON Lines",
            fix=f"name it .jsonl, or pipe it in: stride index build - < {source.name}",
        )


def _damaged(source: Source, error: DamagedStream) -> CorpusError:
    return CorpusError(f"{source.name}:{error.line}: {error.message}", fix=error.fix)


def _decode(data: bytes, name: str, line: int) -> str:
    if b"\0" in data:
        raise nul_found(f"{name}:{line + data[: data.index(0)].count(10)}", "the line")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise not_utf8(f"{name}:{line + data[: error.start].count(10)}", error) from None
