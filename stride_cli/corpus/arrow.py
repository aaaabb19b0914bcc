"""Documents of an Arrow file, as `datasets` writes them: a stream of record batches, read where it lies.

The file is mapped and not copied, so that its size bounds what its columns take: buffers that are compressed,
which could expand to anything, are refused. What offsets lead to is checked before a value is looked at.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

from stride_cli.corpus.documents import Document, DocumentParser, Foreign
from stride_cli.corpus.ranges import Share
from stride_cli.corpus.streams import ReadLog, Source, refuse_change, unreadable
from stride_cli.corpus.table_rows import Column, RowReader, damaged, message_type, plain_type
from stride_cli.errors import CorpusError, require_extra

_ROWS = 256  # that become Python objects at once
_ALL_ROWS = 1 << 62
_MAGIC = b"ARROW1\0\0"  # of the file format, in which a stream follows
_DICTIONARY = 2  # of MessageHeader in Arrow's Message.fbs
_OTHERWISE = "can be written as Parquet"


def read_arrow(
    source: Source, parser: DocumentParser, log: ReadLog, share: Share | None = None
) -> Iterator[Document]:
    """The documents of an Arrow file, or of a share of its rows; the row is the line.

    Raises
    ------
    CorpusError
        No Arrow, damaged, compressed, changed while it is read; a row that is no document, unless the log
        skips these.
    MissingExtraError
        `pyarrow` is not installed.
    """
    try:
        import pyarrow.ipc
    except ImportError:
        raise require_extra("pyarrow", "parquet") from None
    assert source.path is not None  # stdin is never Arrow
    try:
        raw = source.path.open("rb")
    except OSError as error:
        raise unreadable(source.name, error) from None
    with raw:
        with _damage_at(source.name, 0):
            data = pyarrow.memory_map(str(source.path)).read_buffer()
        try:
            yield from _documents(source, raw, data, parser, log, share)
        finally:
            log.leave()


def _documents(
    source: Source, raw: BinaryIO, data: Any, parser: DocumentParser, log: ReadLog, share: Share | None
) -> Iterator[Document]:
    import pyarrow.ipc

    before = os.fstat(raw.fileno())
    start = len(_MAGIC) if data[: len(_MAGIC)].to_pybytes() == _MAGIC else 0
    with _damage_at(source.name, 0):
        _refuse_compressed(data.slice(start), source.name)
        reader = pyarrow.ipc.open_stream(data.slice(start))
        read, foreign = _columns(reader.schema, parser, source.name)
    if not read and before.st_size:
        # no row can be a document, and how many there are is a mere number
        parser.document(foreign, source.name, 1, reader.schema.names)
    rows = RowReader(source.name, before.st_size, parser, log, kind="Arrow", otherwise=_OTHERWISE)
    wanted = (0, _ALL_ROWS)
    if share is not None:
        with _damage_at(source.name, 0):  # no value of them is looked at
            wanted = share.of(sum(batch.num_rows for batch in pyarrow.ipc.open_stream(data.slice(start))))
    done = ended = 0
    log.enter(lambda: done)
    while ended < wanted[1]:
        with _damage_at(source.name, rows.row):
            batch = next(reader, None)
            if batch is None:
                break
            n_bytes, row, ended = 0, ended, ended + batch.num_rows
            if ended > wanted[0]:
                batch = batch.select(read)
                batch.validate(full=True)
                n_bytes = batch.nbytes  # follows offsets, which are checked by now
        first = max(0, wanted[0] - row)
        rows.row = row + first
        batch = batch.slice(first, max(0, min(ended, wanted[1]) - row - first))
        for first in range(0, batch.num_rows, _ROWS):
            part = batch.slice(first, _ROWS)
            with _damage_at(source.name, rows.row):
                columns = [Column(name, part.column(name)) for name in read]
            yield from rows.documents(columns, part.num_rows, foreign, reader.schema.names)
        done = min(before.st_size, done + n_bytes)
    done = before.st_size
    after = os.fstat(raw.fileno())
    refuse_change(source.name, (before.st_size, before.st_mtime_ns), (after.st_size, after.st_mtime_ns))


@contextmanager
def _damage_at(name: str, row: int) -> Iterator[None]:
    """Within, whatever pyarrow raises of a damaged file is a CorpusError."""
    try:
        yield
    except CorpusError:
        raise
    except Exception as error:
        raise damaged(f"{name}:{row + 1}", error, "Arrow") from None


def _columns(schema: Any, parser: DocumentParser, called: str) -> tuple[list[str], dict[str, Foreign]]:
    """The columns to read, and what stands for a value of wanted ones of which no document can be made."""
    from pyarrow import types

    read: list[str] = []
    foreign: dict[str, Foreign] = {}
    for name in dict.fromkeys(parser.fields.names()):
        count = schema.names.count(name)
        if count > 1:
            raise CorpusError(
                f"{called}: expected one column '{name}', found {count}", fix="rename the others"
            )
        if count:
            kind = schema.field(name).type
            plain = not types.is_nested(kind) and not types.is_fixed_size_binary(plain_type(kind))
            if plain or message_type(kind) is not None:
                read.append(name)
            else:
                foreign[name] = Foreign(str(kind))
    return read, foreign


def _refuse_compressed(data: Any, name: str) -> None:
    """CorpusError where a message's buffers are compressed; bodies are passed over and not read."""
    import pyarrow.ipc

    for message in pyarrow.ipc.MessageReader.open_stream(data):
        holds_values = message.type in ("record batch", "dictionary")
        if holds_values and _is_compressed(message.metadata.to_pybytes()):
            raise CorpusError(
                f"{name}: expected an Arrow file as datasets writes it, found compressed buffers",
                fix="write it as Parquet, or without compression",
            )


def _is_compressed(metadata: bytes) -> bool:
    """Whether a message's record batch names a codec (flatbuffers: Message.header.compression)."""
    message = struct.unpack_from("<I", metadata, 0)[0]
    (kind,) = metadata[(place := _field(metadata, message, 1)) : place + 1]
    header = _table(metadata, message, 2)
    batch = _table(metadata, header, 1) if kind == _DICTIONARY else header  # DictionaryBatch.data
    return bool(_field(metadata, batch, 3))


def _field(data: bytes, table: int, number: int) -> int:
    """Where a field of a flatbuffers table is; 0 where it has its default."""
    vtable = table - struct.unpack_from("<i", data, table)[0]
    size = struct.unpack_from("<H", data, vtable)[0]
    entry = 4 + 2 * number
    offset = struct.unpack_from("<H", data, vtable + entry)[0] if entry < size else 0
    return table + offset if offset else 0


def _table(data: bytes, table: int, number: int) -> int:
    """Where the table is that a field refers to."""
    place = _field(data, table, number)
    if not place:
        raise ValueError("a message without its header")
    return int(place + struct.unpack_from("<I", data, place)[0])
