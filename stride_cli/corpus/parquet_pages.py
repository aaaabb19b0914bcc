"""The pages of a Parquet file, by their headers: what reading them will take, known before it is taken.

The metadata at the end of the file say so too, but are not what a reader allocates by, and a file made to
harm says there what it likes. A header is a Thrift struct in compact protocol, ``PageHeader`` of
parquet-format.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

DATA, DICTIONARY, DATA_V2 = 0, 2, 3  # PageType
BY_DICTIONARY = (2, 8)  # Encoding: PLAIN_DICTIONARY, RLE_DICTIONARY
BY_PREFIX = 7  # Encoding: DELTA_BYTE_ARRAY, where a value repeats the beginning of the one before
_HEADER_BYTES = (1 << 12, 1 << 16, 1 << 20, 1 << 24)  # most have less than 100; statistics may be long
_NESTED = 16  # a header's own depth is 3
# of a Thrift field: type → how it is read
_TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = range(1, 13)
_UNION_OF_HEADERS = {DATA: 5, DICTIONARY: 7, DATA_V2: 8}  # PageType → the field that describes it
_ENCODING = {DATA: 2, DICTIONARY: 2, DATA_V2: 4}  # PageType → the field of the encoding in that


@dataclass(frozen=True, slots=True)
class Page:
    """A page: its type, bytes once decompressed, values (nulls too) and encoding."""

    kind: int
    size: int
    values: int
    encoding: int


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
        kind, size, packed = (_whole(header.get(field)) for field in (1, 2, 3))
        place += length + packed
        if kind in _UNION_OF_HEADERS:
            about = header.get(_UNION_OF_HEADERS[kind])
            if not isinstance(about, dict):
                raise ValueError("a page without a description")
            yield Page(kind, size, _whole(about.get(1)), _whole(about.get(_ENCODING[kind])))
    if place > end:
        raise ValueError("a page that goes on beyond its column")


def _whole(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError("a page header without a size")
    return value


def _header(file: BinaryIO, place: int, end: int) -> tuple[dict[int, Any], int]:
    for size in _HEADER_BYTES:
        file.seek(place)
        data = file.read(min(size, end - place))
        try:
            return _struct(data, 0, 0)
        except IndexError:
            if len(data) < size:
                break
    raise ValueError("a page header that is cut off")


def _struct(data: bytes, place: int, depth: int) -> tuple[dict[int, Any], int]:
    """Fields by number, and the place behind them; IndexError where the data end before."""
    found: dict[int, Any] = {}
    number = 0
    while head := data[place]:
        place += 1
        if head >> 4:
            number += head >> 4
        else:
            number, place = _signed(data, place)
        kind = head & 15
        if kind in (_TRUE, _FALSE):
            found[number] = kind == _TRUE
        else:
            found[number], place = _value(data, place, kind, depth)
    return found, place + 1


def _value(data: bytes, place: int, kind: int, depth: int) -> tuple[Any, int]:
    if depth > _NESTED:
        raise ValueError("a page header nested too deeply")
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
        for _ in range(count):
            _, place = _value(data, place, head & 15, depth + 1)
        return None, place
    raise ValueError("a page header of unknown contents")


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
            raise ValueError("a page header with an endless number")


def _signed(data: bytes, place: int) -> tuple[int, int]:
    value, place = _unsigned(data, place)
    return value >> 1 ^ -(value & 1), place
