"""The readers of a corpus: whatever the bytes, documents or an error with a remedy."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import zstandard

from stride_cli.corpus import tables as corpus_tables
from stride_cli.corpus.readers import Document, Fields, ReadOptions, read_documents
from stride_cli.corpus.sources import ReadLog
from stride_cli.errors import StrideError
from tests.fuzz import allowed, trying

NAMES = ("id", "text", "prompt", "response", "messages", "role", "content", "other", "")
_TEXTS = (
    "", " ", "a", "two words", "ünï 漢字 🙂", "\ud800", "\udc00x", "\0", "\x1b[31m", "\r", "\r\n", "\u2028",
    "\ufeff", "x" * 300, "-1", "null", "\ue0a01\ue0a1",
)  # fmt: skip
_NUMBERS = ("0", "-1", "1e400", "-0.0", "NaN", "Infinity", "-Infinity", "9" * 20, "9" * 5000, "1.5")
_PIECES = (
    b"\n", b"\r", b"\r\n", b"\0", b"\xff", b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff", b"{", b"}", b"[", b'"',
    b"\\", b"\\ud800", b"\\u0000", b"{}", b"[" * 3000, b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"PAR1", b",",
    b"\x50\x2a\x4d\x18", b"BZh91AY&SY", b'"id":"a",', b"\x80" * 9, b"\xff\xff\xff\xff\x07", b"\x00" * 8,
)  # fmt: skip


def readers(r: random.Random) -> None:
    """One file, or stdin, of any format, whole or damaged."""
    r.choice((_lines, _lines, _text, _garbage, _table, _table))(r)


TARGETS: dict[str, Callable[[random.Random], None]] = {"readers": readers}


def json_text(r: random.Random, depth: int = 0) -> str:
    """A JSON value, as text: of any type, with names twice, numbers without end and half surrogates."""
    kind = r.randrange(5 if depth > 4 else 8)
    if kind == 0:
        return r.choice(("null", "true", "false"))
    if kind == 1:
        return r.choice(_NUMBERS)
    if kind in (2, 3, 4):
        return json.dumps(r.choice(_TEXTS), ensure_ascii=r.random() < 0.7)
    if kind == 5:
        return "[" + ",".join(json_text(r, depth + 1) for _ in range(r.randrange(4))) + "]"
    pairs = (f"{json.dumps(r.choice(NAMES))}:{json_text(r, depth + 1)}" for _ in range(r.randrange(4)))
    return "{" + ",".join(pairs) + "}"


def line(r: random.Random) -> str:
    """A line that is often a document, or nearly one."""
    if r.random() < 0.1:
        return json_text(r)
    message = lambda: f'{{"role": {value(0.1)}, "content": {value(0.1)}}}'  # noqa: E731
    value = lambda odd: json_text(r) if r.random() < odd else json.dumps(f"t{r.randrange(99)}")  # noqa: E731
    forms = (
        lambda: f'"text": {value(0.2)}',
        lambda: f'"prompt": {value(0.1)}, "response": {value(0.1)}',
        lambda: f'"messages": [{", ".join(message() for _ in range(r.randrange(4)))}]',
        lambda: f"{json.dumps(r.choice(NAMES))}: {value(0.5)}",
    )
    parts = [f'"id": {value(0.1)}', *(r.choice(forms)() for _ in range(r.choice((1, 1, 1, 2))))]
    return "{" + ", ".join(parts) + "}"


def damaged(r: random.Random, data: bytes) -> bytes:
    """The bytes after a few changes: cut, doubled, overwritten, in their middle or at their end."""
    changed = bytearray(data)
    for _ in range(r.choice((0, 1, 1, 2, 5, 20))):
        place = r.randrange(len(changed) + 1)
        if r.random() < 0.3:
            place = max(0, len(changed) - r.randrange(1, 400))  # a table's metadata are there
        size = r.choice((1, 1, 2, 8, 100))
        kind = r.randrange(6)
        if kind == 0 and place < len(changed):
            changed[place] ^= 1 << r.randrange(8)
        elif kind == 1:
            changed[place : place + size] = r.randbytes(size)
        elif kind == 2:
            del changed[place : place + size]
        elif kind == 3:
            changed[place:place] = r.choice(_PIECES)
        elif kind == 4:
            changed[place:place] = changed[place : place + 10 * size]
        elif r.random() < 0.2:
            del changed[place:]
    return bytes(changed)


def _lines(r: random.Random) -> None:
    ending = r.choice(("\n", "\n", "\n", "\r\n", "\r"))
    text = "".join(line(r) + ending for _ in range(r.randrange(6)))
    encoding = r.choice(("utf-8",) * 8 + ("utf-8-sig", "utf-16", "utf-16-le", "utf-32"))
    data = text.encode(encoding, "surrogatepass")
    if r.random() < 0.5:
        data = damaged(r, data)
    options = _options(r)
    found = [read_file("corpus.jsonl", data, options)]
    for pack in (_gzip, zstandard.compress):
        packed = pack(data)
        found.append(read_file("corpus.jsonl", packed, options))
        found.append(read_stdin(packed, options, r.choice((1, 7, 1 << 20))))
    if not data.startswith((b"\x1f\x8b", b"\x28\xb5\x2f\xfd")):  # which is unpacked, but not twice
        assert all(each == found[0] for each in found), found
    for name, packed in (
        ("corpus.jsonl.gz", _gzip(data)),
        ("corpus.jsonl.zst", zstandard.compress(data)),
    ):
        read_file(name, damaged(r, packed), options)


def _gzip(data: bytes) -> bytes:
    return gzip.compress(data, mtime=0)


def _text(r: random.Random) -> None:
    data = "\n".join(r.choice(_TEXTS) for _ in range(r.randrange(5))).encode(
        r.choice(("utf-8", "utf-8", "utf-8-sig", "utf-16")), "surrogatepass"
    )
    read_file(r.choice(("a.txt", "README", "a.md.gz")), damaged(r, data), _options(r))


def _garbage(r: random.Random) -> None:
    data = r.choice((b"", *_PIECES)) + r.randbytes(r.choice((0, 1, 3, 20, 500)))
    if r.random() < 0.5:
        data = r.choice((_gzip, zstandard.compress))(data)
    name = r.choice(("a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.txt", "a.parquet", "none", "a.json"))
    read_file(name, data, _options(r))
    read_stdin(data, _options(r), 1)


def _table(r: random.Random) -> None:
    whole = r.choice(tables())
    data = damaged(r, whole)
    options = _options(r)
    found = read_file("a.parquet", data, options)
    # as row groups that are large, and batches of one row
    with mock.patch.object(corpus_tables, "_BATCH_BYTES", 1):
        other = read_file("a.parquet", data, options)
    if data == whole:
        assert other == found, (other, found)


@cache
def tables() -> tuple[bytes, ...]:
    """Small Parquet files of many types, codecs and encodings."""
    import datetime
    import decimal

    import pyarrow as pa
    import pyarrow.parquet as pq

    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    text = [f"text {number % 3}" for number in range(40)]
    ids = [f"id {number}" for number in range(40)]
    message = pa.struct(
        [("role", pa.large_string()), ("content", pa.large_string()), ("weight", pa.float32())]
    )
    moment = datetime.datetime(2026, 1, 1)
    columns: list[dict[str, Any]] = [
        {"id": ids, "text": text},
        {"id": list(range(40)), "prompt": text, "response": text},
        {"id": ids, "messages": [talk * (number % 3) for number in range(40)]},
        {"id": ids, "messages": pa.array([talk] * 40, pa.large_list(message))},
        {"id": ids, "text": pa.array(text, pa.large_string()), "other": [[1, 2]] * 40},
        {"id": ids, "text": pa.array(text).dictionary_encode()},
        {"id": [decimal.Decimal(number) for number in range(40)], "text": [moment] * 40},
        {"id": [b"12345678"] * 40, "text": pa.array([b"12345678"] * 40, pa.binary(8))},
        {"id": ids, "text": [{"a": "b"}] * 40, "messages": [["a"]] * 40},
        {"id": ids, "text": pa.nulls(40), "prompt": [True] * 40, "response": text},
    ]
    options: list[dict[str, Any]] = [
        {"compression": "snappy"},
        {"compression": "zstd", "row_group_size": 10},
        {"compression": "none", "use_dictionary": False, "data_page_size": 100, "write_batch_size": 8},
        {"compression": "none", "store_schema": False, "write_statistics": False},
    ]
    made = []
    for each in columns:
        for chosen in options:
            sink = io.BytesIO()
            pq.write_table(pa.table(each), sink, **chosen)
            made.append(sink.getvalue())
    sink = io.BytesIO()
    prefixes = {"id": "DELTA_BYTE_ARRAY", "text": "DELTA_LENGTH_BYTE_ARRAY"}
    pq.write_table(
        pa.table({"id": ids, "text": text}),
        sink,
        use_dictionary=False,
        column_encoding=prefixes,
        compression="none",
    )
    return (*made, sink.getvalue())


def _options(r: random.Random) -> ReadOptions:
    return ReadOptions(
        number_ids=r.random() < 0.3,
        on_bad=r.choice(("error", "skip")),
        max_document_bytes=r.choice((1, 50, 1000, 1 << 20)),
        fields=Fields() if r.random() < 0.8 else Fields(id=r.choice(NAMES), text=r.choice(NAMES)),
    )


@cache
def _folder() -> Path:
    made = tempfile.TemporaryDirectory(prefix="stride-fuzz-")
    _kept.append(made)
    return Path(made.name)


_kept: list[tempfile.TemporaryDirectory[str]] = []  # removed when the process ends


def read_file(name: str, data: bytes, options: ReadOptions) -> list[Any]:
    """What is read of a file of that name and content; see `_read`."""
    trying(data)
    path = _folder() / name
    path.write_bytes(data)
    return _read(str(path), options)


def _read(name: str, options: ReadOptions) -> list[Any]:
    """What is read of a source, to compare: documents, and the error without the source's name."""
    found: list[Any] = []
    with allowed():
        try:
            for document in read_documents([name], options, log=ReadLog(options.on_bad, lambda text: None)):
                _check(document)
                found.append((document.id, document.plain_text, document.line))
        except StrideError as error:
            found.append(error.message.replace("<stdin>" if name == "-" else name, "SOURCE"))
            raise
    return found


def _check(document: Document) -> None:
    assert document.id and document.line >= 1
    document.digest()  # all of it can be written
    assert document.plain_text.strip() and "\0" not in document.plain_text and "\0" not in document.id


class _Dribble(io.RawIOBase):
    """A pipe that gives so many bytes at once."""

    def __init__(self, data: bytes, size: int) -> None:
        self._data = io.BytesIO(data)
        self._size = size

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._data.read(min(self._size, len(buffer)))
        buffer[: len(data)] = data
        return len(data)


@contextlib.contextmanager
def _stdin(data: bytes, size: int) -> Iterator[None]:
    before = sys.stdin
    sys.stdin = io.TextIOWrapper(io.BufferedReader(_Dribble(data, size)))
    try:
        yield
    finally:
        sys.stdin = before


def read_stdin(data: bytes, options: ReadOptions, size: int) -> list[Any]:
    """What is read of a pipe that gives so many bytes at once; see `_read`."""
    trying(data)
    with _stdin(data, size):
        return _read("-", options)
