"""The pages of a Parquet file, by their headers: what reading them will take, known before it is taken.

The metadata at the end of the file state the same in sum, but are not what a reader allocates by, and a file
made to harm states there what it likes. They are needed for where columns begin, and read here too: asked for
a column of a damaged file, pyarrow ends the process (26.0, "level histogram size mismatch"). Both are Thrift
structs in compact protocol, ``FileMetaData`` and ``PageHeader`` of parquet-format.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

DATA, DICTIONARY, DATA_V2 = 0, 2, 3  # PageType
BY_DICTIONARY = (2, 8)  # Encoding: PLAIN_DICTIONARY, RLE_DICTIONARY
BY_PREFIX = 7  # Encoding: DELTA_BYTE_ARRAY, where a value repeats the beginning of the one before
_HEADER_BYTES = (1 << 12, 1 << 16, 1 << 20, 1 << 24)  # most have less than 100; statistics may be long
_NESTED = 24  # what is there is 8 deep
# of a Thrift field: type → how it is read
_TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = range(1, 13)
_ABOUT = {DATA: 5, DICTIONARY: 7, DATA_V2: 8}  # PageType → the field of a header that describes it
_ENCODING = {DATA: 2, DICTIONARY: 2, DATA_V2: 4}  # PageType → the field of the encoding in that
_Fields = dict[tuple[int, int], Any]  # (number, type): other readers pass over a field of another type


@dataclass(frozen=True, slots=True)
class RowGroup:
    """A row group: its rows, and where its columns are, in the order of the schema: first byte, and bytes."""

    rows: int
    columns: list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Page:
    """A page: its type, bytes once decompressed, values (nulls too) and encoding."""

    kind: int
    size: int
    values: int
    encoding: int


def row_groups(file: BinaryIO) -> list[RowGroup]:
    """The row groups of a file.

    Raises
    ------
    ValueError      the metadata are none
    OSError         the operating system refuses
    """
    end = file.seek(0, 2) - 8
    file.seek(max(0, end))
    size = int.from_bytes(file.read(4), "little")
    if end < size:
        raise ValueError("metadata longer than the file")
    file.seek(end - size)
    try:
        metadata, _ = _struct(file.read(size), 0, 0)
    except IndexError:
        raise ValueError("metadata that are cut off") from None
    return [
        RowGroup(
            _whole(_field(group, 3, _I64)),
            [_extent(_field(column, 3, _STRUCT)) for column in _field(group, 1, _LIST)],
        )
        for group in _field(metadata, 4, _LIST)
    ]


def _extent(column: _Fields) -> tuple[int, int]:
    begin, dictionary = _field(column, 9, _I64), column.get((11, _I64), 0)
    # as pyarrow has it
    return _whole(dictionary if 0 < dictionary < begin else begin), _whole(_field(column, 7, _I64))


def _field(struct: Any, number: int, kind: int) -> Any:
    if not isinstance(struct, dict) or (number, kind) not in struct:
        raise ValueError("metadata without what says where columns are")
    return struct[number, kind]


def pages(file: BinaryIO, begin: int, n_bytes: int) -> Iterator[Page]:
    """The data and dictionary pages of a column chunk that begins at a byte of a file.

    Raises
    ------
    ValueError      what is there is no page
    OSError         the operating system refuses
    """
    place, end = begin, begin + n_bytes
    while place < end:
        header, length = _header(file, place, end)
        kind, size, packed = (_whole(header.get((number, _I32))) for number in (1, 2, 3))
        place += length + packed
        if kind in _ABOUT:
            about = header.get((_ABOUT[kind], _STRUCT), {})
            yield Page(kind, size, *(_whole(about.get((number, _I32))) for number in (1, _ENCODING[kind])))
    if place > end:
        raise ValueError("a page that goes on beyond its column")


def _whole(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError("a page or column without a size")
    return value


def _header(file: BinaryIO, place: int, end: int) -> tuple[_Fields, int]:
    for size in _HEADER_BYTES:
        file.seek(place)
        data = file.read(min(size, end - place))
        try:
            return _struct(data, 0, 0)
        except IndexError:
            if len(data) < size:
                break
    raise ValueError("a page header that is cut off")


def _struct(data: bytes, place: int, depth: int) -> tuple[_Fields, int]:
    """Fields, and the place behind them; IndexError where the data end before."""
    found: _Fields = {}
    number = 0
    while head := data[place]:
        place += 1
        if head >> 4:
            number += head >> 4
        else:
            number, place = _signed(data, place)
        kind = head & 15
        if kind not in (_TRUE, _FALSE):
            found[number, kind], place = _value(data, place, kind, depth)
    return found, place + 1


def _value(data: bytes, place: int, kind: int, depth: int) -> tuple[Any, int]:
    """A value, None where it is neither a whole number nor of these, and the place behind it."""
    if depth > _NESTED:
        raise ValueError("metadata nested too deeply")
    if kind in (_I16, _I32, _I64):
        return _signed(data, place)
    if kind == _STRUCT:
        return _struct(data, place, depth + 1)
    if kind in (_BYTE, _TRUE, _FALSE):  # as items of a list booleans are bytes
        return None, _inside(data, place + 1)
    if kind == _DOUBLE:
        return None, _inside(data, place + 8)
    if kind == _BINARY:
        size, place = _unsigned(data, place)
        return None, _inside(data, place + size)
    if kind in (_LIST, _SET):
        head = data[place]
        count, place = (head >> 4, place + 1) if head >> 4 < 15 else _unsigned(data, place + 1)
        values = []
        for _ in range(count):
            value, place = _value(data, place, head & 15, depth + 1)
            values.append(value)
        return values, place
    raise ValueError("metadata of unknown contents")


def _inside(data: bytes, place: int) -> int:
    if place > len(data):
        raise IndexError
    return place


def _unsigned(data: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[place]
        place += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, place
        shift += 7
        if shift > 63:
            raise ValueError("metadata with an endless number")


def _signed(data: bytes, place: int) -> tuple[int, int]:
    value, place = _unsigned(data, place)
    return value >> 1 ^ -(value & 1), place
