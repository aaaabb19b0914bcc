"""Documents of a corpus, one by one, whatever file they come in; bad ones named by file and line."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from stride_cli.corpus.documents import (
    FIX_OR_SKIP,
    Document,
    DocumentParser,
    Fields,
    Repeated,
    SeenIds,
    bad,
    not_utf8,
    too_long,
    type_name,
)
from stride_cli.corpus.options import Range
from stride_cli.corpus.sources import ReadLog, Source, file_bytes, find_sources
from stride_cli.corpus.streams import decompressed_bytes, open_stream, read_lines, refuse_foreign
from stride_cli.corpus.tables import read_table
from stride_cli.errors import CorpusError, EmptyRange, UsageError
from stride_cli.options import CORPUS, Options, option, own

DEFAULT_MAX_DOCUMENT_BYTES = 16 * 2**20
_BOM = b"\xef\xbb\xbf"
_TEXT_SUFFIXES = {".txt", ".text", ".md", ".rst", ".tex", ".html", ".htm", ".xml"}
# an object with a name twice is told apart
_DECODER = json.JSONDecoder(object_pairs_hook=Repeated.or_dict)


@dataclass(frozen=True)
class ReadOptions(Options):
    """Options of reading a corpus; their help texts describe them. `fields`: what it calls its fields."""

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
        """Make options of values by name, those of `Fields` among them."""
        return cls(**own(cls, given), fields=Fields(**own(Fields, given)))


def open_documents(
    sources: Sequence[str],
    options: ReadOptions = ReadOptions(),
    *,
    known_ids: Iterable[str] = (),
    first_number: int = 0,
    scratch: Path | None = None,
    log: ReadLog | None = None,
    part: Range | None = None,
) -> tuple[Iterator[Document], ReadLog]:
    """Stream the documents of a corpus in order; also the log of the read.

    Memory: one document, and some 100,000 ids seen; more of them are on disk, some 40 bytes each.

    Args:
        sources: Files (JSON Lines, Parquet, Arrow, plain text with one document a file; .gz and .zst of the
            first and last), globs, folders of Parquet or Arrow files or that `datasets` saved,
            ``hf://datasets/OWNER/NAME`` (which is fetched), `-`.
        options: Names of fields, and treatment of bad records.
        known_ids: Ids already taken (by an index that is appended to).
        first_number: The first number, where documents are numbered.
        scratch: Where many ids are kept; default: the system's temporary directory.
        log: Receives what is skipped and how far the read is; then `on_bad` is the log's.
        part: Read this part alone. Compressed JSON Lines that it begins or ends in are read twice.

    Raises:
        CorpusError: With file and line: broken JSON, not an object, missing or duplicate id, empty document,
            not UTF-8, a NUL, too long, a wrong type; a truncated archive. And: no such file, a pattern
            without a match, no document at all (of a part: `EmptyRange`). Sources are looked up at the call.
        UsageError: A part of what has no size: stdin, a pipe.
    """
    found = find_sources(sources)
    log = log if log is not None else ReadLog(options.on_bad)
    sizes = [file_bytes(source) for source in found]
    if part is not None:
        for source, size in zip(found, sizes, strict=True):
            if size is None:
                streamed = f"--range {part} is of files, and {source.name} is a stream of unknown size"
                raise UsageError(streamed, fix="write it to a file first, or build without --range")
        shares = part.shares([size or 0 for size in sizes])
        found = [replace(source, share=share) for source, share in zip(found, shares, strict=True) if share]
        sizes = [share.high - share.low for share in shares if share]
    log.bytes_total = None if None in sizes else sum(size or 0 for size in sizes)
    seen = SeenIds(known_ids, scratch)
    parser = DocumentParser(
        options.fields, options.max_document_bytes, options.number_ids, first_number, seen, log.unread
    )
    return _read(found, part, parser, log), log


def read_documents(
    sources: Sequence[str], options: ReadOptions = ReadOptions(), **more: Any
) -> Iterator[Document]:
    """Stream the documents of a corpus; as `open_documents`, without the log."""
    return open_documents(sources, options, **more)[0]


def read_records(path: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield the objects of a file of JSON Lines (also .gz and .zst), each with its line, from 1.

    Raises:
        CorpusError: No such file; with file and line: broken JSON, no object, not UTF-8, too long, damaged.
    """
    (source,) = find_sources([path])
    for number, line in _lines(source, ReadLog(), DEFAULT_MAX_DOCUMENT_BYTES):
        if line is None:
            raise too_long(f"{source.name}:{number}", DEFAULT_MAX_DOCUMENT_BYTES, "line")
        if line.strip():
            yield number, _parse_json(line, source.name, number)


def _read(
    sources: list[Source], part: Range | None, parser: DocumentParser, log: ReadLog
) -> Iterator[Document]:
    count = 0
    try:
        for source in sources:
            read = {"jsonl": _read_jsonl, "text": _read_text}.get(source.kind, read_table)
            for document in read(source, parser, log):
                count += 1
                yield document
    finally:
        log.finish()
    if count == 0:
        names = ", ".join(source.name for source in sources[:3]) + (", …" if len(sources) > 3 else "")
        skipped = f" ({log.skipped} bad records were skipped)" if log.skipped else ""
        if part is not None:
            fix = "give --range of fewer parts: every part needs a document that begins in it"
            raise EmptyRange(f"{names}: expected a document in the range, found none{skipped}", fix=fix)
        fix = 'give a file with lines such as {"id": "a", "text": "..."}'
        raise bad(names, "at least one record", f"none{skipped}", fix)


def _lines(source: Source, log: ReadLog, limit: int) -> Iterator[tuple[int, bytes | None]]:
    """Yield the lines of a source, or of its share, with their numbers; None for one that is too long."""
    whole = replace(source, share=None)
    first, stop = source.share.of(decompressed_bytes(whole)) if source.share else (0, None)
    with open_stream(source, log) as stream:
        for number, line in read_lines(stream, limit, first, stop):
            if number == 1 and line is not None:
                refuse_foreign(line, source.name)
            # not of the first line alone: files are concatenated
            yield number, line if line is None else line.removeprefix(_BOM)


def _read_jsonl(source: Source, parser: DocumentParser, log: ReadLog) -> Iterator[Document]:
    for number, line in _lines(source, log, parser.max_bytes):
        try:
            if line is None:
                raise too_long(f"{source.name}:{number}", parser.max_bytes, "line")
            if not line.strip():
                continue
            document = parser.document(_parse_json(line, source.name, number), source.name, number)
        except CorpusError as error:
            log.reject(error)
        else:
            yield document


def _read_text(source: Source, parser: DocumentParser, log: ReadLog) -> Iterator[Document]:
    if source.share is not None and source.share.low > 0:  # the file is one document, which begins at 0
        return
    with open_stream(source, log) as stream:
        data = stream.read(parser.max_bytes + 1)
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
    else:
        yield document


def _parse_json(line: bytes, name: str, number: int) -> Mapping[str, Any]:
    where = f"{name}:{number}"
    text = _decode(line, name, number)
    try:
        record = _DECODER.decode(text)
    except (ValueError, RecursionError) as error:
        raise _broken_json(where, line, name, error) from None
    if not isinstance(record, dict):
        listed = isinstance(record, list)
        fix = "give one object a line: jq -c '.[]' FILE > FILE.jsonl" if listed else FIX_OR_SKIP
        raise bad(where, "a JSON object on the line", type_name(record), fix)
    return record


def _broken_json(where: str, line: bytes, name: str, error: Exception) -> CorpusError:
    fix = FIX_OR_SKIP
    if name.lower().endswith(".json") or line.strip() in (b"[", b"[{"):
        fix = "give one object a line: jq -c '.[]? // .' FILE > FILE.jsonl"
    if isinstance(error, RecursionError):
        reason = "nested too deeply"
    elif not isinstance(error, json.JSONDecodeError):  # Python's limit, whose text names Python's remedy
        reason = "an integer of more than 4,300 digits"
    else:
        reason = f"{error.msg} at character {error.pos + 1}"  # of this line, not of the file
        if b"\r" in line.strip():
            reason += "; there are carriage returns inside the line"
            fix = "end lines in a line feed: tr '\\r' '\\n' < FILE > FILE.jsonl"
    return bad(where, "a JSON object on the line", f"broken JSON: {reason}", fix)


def _refuse_disguised_jsonl(text: str, source: Source) -> None:
    found = None
    with suppress(ValueError, RecursionError):
        found = _DECODER.decode(text.lstrip().split("\n", 1)[0])
    if isinstance(found, dict):
        fix = f"name it .jsonl, or pipe it in: stride index build - < {source.name}"
        raise bad(f"{source.name}:1", "plain text (one document a file)", "JSON Lines", fix)


def _decode(data: bytes, name: str, line: int) -> str:
    if b"\0" in data:
        where = f"{name}:{line + data[: data.index(0)].count(10)}"
        raise bad(where, "text", "a NUL character in the line")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise not_utf8(f"{name}:{line + data[: error.start].count(10)}", error) from None
