"""Documents of a Parquet file, of which no more is in memory than a batch of rows and a page of each column.

What a file of a few kilobytes can expand to has no limit: a page of one byte over and over, a value that a
dictionary holds once and a million rows refer to, a row with a billion messages. So the pages of a row group
are looked at before it is read, and it is read in batches that hold however long its values are.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO

from stride_cli.corpus.documents import Document, DocumentParser, Foreign
from stride_cli.corpus.parquet_pages import BY_DICTIONARY, BY_PREFIX, DICTIONARY, RowGroup, pages, row_groups
from stride_cli.corpus.ranges import Share
from stride_cli.corpus.streams import (
    DamagedStream,
    ReadLog,
    Source,
    refuse_change,
    refuse_expansion,
    unreadable,
)
from stride_cli.corpus.table_rows import Column, RowReader, damaged, message_type, plain_type
from stride_cli.errors import CorpusError, require_extra

_ROWS = 256  # of a batch, at most
_ALL_ROWS = 1 << 62
_BATCH_BYTES = 64 << 20  # what a batch is to take at most; a single row may take more
_READ_BYTES = 1 << 20  # of a column at once, as stored
# of a page, decompressed: pyarrow writes 1 MiB, or 1,024 values where these are long
MOST_PAGE_BYTES = 1 << 30
# of messages in one row group: values, and bytes where all rows have to be read at once
MOST_VALUES = 1 << 26
MOST_AT_ONCE = 512 << 20
_SMALLER_GROUPS = (
    "write it again with smaller row groups: pyarrow.parquet.write_table(table, FILE, row_group_size=1000)"
)
_OTHERWISE = "can be piped in as JSON Lines"


@dataclass(frozen=True, slots=True)
class _Leaf:
    """A column as stored: its number among all, its path, whether it holds texts, and whether in lists."""

    number: int
    path: str
    texts: bool
    nested: bool


@dataclass(frozen=True, slots=True)
class _Table:
    """The columns of a file.

    Attributes
    ----------
    columns : list of str           the names of all
    read : list of str              those read
    leaves : list of _Leaf          the same, as stored
    foreign : dict of str           wanted ones of which no document can be made, and what stands for a value
    """

    columns: list[str]
    read: list[str]
    leaves: list[_Leaf]
    foreign: dict[str, Foreign]


def read_parquet(
    source: Source, parser: DocumentParser, log: ReadLog, share: Share | None = None
) -> Iterator[Document]:
    """The documents of a Parquet file, or of a share of its rows; the row is the line.

    Raises
    ------
    CorpusError
        No Parquet, damaged, changed while it is read, or made so that no bounded memory holds what it expands
        to; a row that is no document, unless the log skips these.
    MissingExtraError
        `pyarrow` is not installed.
    """
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError:
        raise require_extra("pyarrow", "parquet") from None
    assert source.path is not None  # stdin is never Parquet
    if not source.path.is_file():
        raise CorpusError(
            f"{source.name}: expected a Parquet file, found a pipe or a device",
            fix="copy it to a file: Parquet is read from its end",
        )
    try:
        raw = source.path.open("rb")
    except OSError as error:
        raise unreadable(source.name, error) from None
    with raw, ExitStack() as opened:
        try:
            yield from _documents(source, raw, opened, parser, log, share)
        finally:
            log.leave()


def _documents(
    source: Source,
    raw: BinaryIO,
    opened: ExitStack,
    parser: DocumentParser,
    log: ReadLog,
    share: Share | None,
) -> Iterator[Document]:
    before = os.fstat(raw.fileno())
    made = RowReader(source.name, before.st_size, parser, log, kind="Parquet", otherwise=_OTHERWISE)
    with _damage_at(source.name, 0):
        file = opened.enter_context(_open(source))
        rows = file.metadata.num_rows
        table = _table(file, parser, source.name)
    log.enter(lambda: before.st_size * min(made.row, rows) // max(rows, 1))
    if rows and not table.read:
        # no row can be a document, and how many there are is a mere number
        parser.document(table.foreign, source.name, 1, table.columns)
    wanted = (0, _ALL_ROWS) if share is None else share.of(rows)
    batches = _batches(file, table, raw, opened, source, wanted)
    while True:
        with _damage_at(source.name, made.row):
            made.row, batch = next(batches, (made.row, None))
            found = [] if batch is None else [Column(name, batch.column(name)) for name in table.read]
        if batch is None:
            break
        yield from made.documents(found, batch.num_rows, table.foreign, table.columns)
    after = os.fstat(raw.fileno())
    refuse_change(source.name, (before.st_size, before.st_mtime_ns), (after.st_size, after.st_mtime_ns))


@contextmanager
def _damage_at(name: str, row: int) -> Iterator[None]:
    """Within, whatever pyarrow raises of a damaged file is a CorpusError."""
    try:
        yield
    except CorpusError:
        raise
    except DamagedStream as error:
        raise CorpusError(f"{name}:{row + 1}: {error.message}", fix=error.fix) from None
    except MemoryError:
        raise CorpusError(
            f"{name}:{row + 1}: expected rows that fit in memory, found none left", fix=_SMALLER_GROUPS
        ) from None
    except Exception as error:  # its own errors, and ValueError, KeyError, OverflowError … of names and types
        raise damaged(f"{name}:{row + 1}", error) from None


def _table(file: Any, parser: DocumentParser, called: str) -> _Table:
    """What is to be read of a file that is called so."""
    schema = file.schema_arrow
    columns = list(schema.names)
    stored = [file.schema.column(number) for number in range(len(file.schema))]
    read: list[str] = []
    leaves: list[_Leaf] = []
    foreign: dict[str, Foreign] = {}
    for name in parser.fields.names():
        if name not in columns or name in read or name in foreign:
            continue
        if columns.count(name) > 1:
            raise CorpusError(
                f"{called}: expected one column '{name}', found {columns.count(name)}",
                fix="rename the others",
            )
        kind = schema.field(name).type
        found = []
        for number, column in enumerate(stored):
            nested = column.path != name
            if _is_stored(column.path, name, kind):
                found.append(_Leaf(number, column.path, column.physical_type == "BYTE_ARRAY", nested))
        if found:
            read.append(name)
            leaves += found
        else:
            foreign[name] = Foreign(str(kind))
    return _Table(columns, read, leaves, foreign)


def _is_stored(path: str, name: str, kind: Any) -> bool:
    """Whether the column stored at a path holds values of the column `name`, of which documents are made."""
    from pyarrow import types

    if not types.is_nested(kind):
        return path == name and not types.is_fixed_size_binary(plain_type(kind))
    element = message_type(kind)
    if element is None:
        return False
    above, _, last = path.rpartition(".")
    # messages.list.element.role, or as older writers name the levels between
    return (
        above.startswith(f"{name}.")
        and above.count(".") - name.count(".") in (1, 2)
        and last in ("role", "content")
    )


def _open(source: Source, **options: Any) -> Any:
    """The file, of which columns are read piece by piece."""
    import pyarrow.parquet

    return pyarrow.parquet.ParquetFile(source.path, pre_buffer=False, buffer_size=_READ_BYTES, **options)


def _batches(
    file: Any,
    table: _Table,
    raw: BinaryIO,
    opened: ExitStack,
    source: Source,
    wanted: tuple[int, int],
) -> Iterator[tuple[int, Any]]:
    """Rows first … stop-1 of a file, batch by batch, each with its first: every row group as its pages
    demand."""
    by_dictionary = None
    paths = [leaf.path for leaf in table.leaves]
    size = os.fstat(raw.fileno()).st_size
    taken = given = ended = 0
    for number, group in enumerate(row_groups(raw) if table.leaves else ()):
        row, ended = ended, ended + group.rows
        if ended <= wanted[0] or row >= wanted[1]:
            continue
        where = f"{source.name}: row group {number}"
        found = [_look_at(group, leaf, raw, where) for leaf in table.leaves]
        # columns may share their bytes, in a file made so
        taken = min(size, taken + sum(pages.packed for pages in found))
        given += sum(pages.size for pages in found)
        refuse_expansion(taken, given, _OTHERWISE)
        chosen, rows = file, _rows_at_once(found, group.rows, where)
        if rows is None:
            if by_dictionary is None:
                texts = [leaf.path for leaf in table.leaves if leaf.texts]
                by_dictionary = opened.enter_context(_open(source, read_dictionary=texts))
            chosen, rows = by_dictionary, max(1, min(group.rows, MOST_VALUES))
        for batch in chosen.iter_batches(
            batch_size=rows, row_groups=[number], columns=paths, use_threads=False
        ):
            first, stop = max(0, wanted[0] - row), min(batch.num_rows, wanted[1] - row)
            if first < stop:
                yield row + first, batch.slice(first, stop - first)
            row += batch.num_rows


@dataclass(slots=True)
class _Pages:
    """What the pages of a column in a row group add up to.

    Attributes
    ----------
    packed, size : int      their bytes, as stored and decompressed
    values : int            nulls too
    repeated : int          of these, values that may be longer than what stands for them in the page
    largest : int           the most bytes that such a value can have
    each : float            bytes of a value, in the page where these are the most
    prefixes : bool         whether values are stored as what they add to the one before
    """

    leaf: _Leaf
    packed: int
    size: int = 0
    values: int = 0
    repeated: int = 0
    largest: int = 0
    each: float = 0.0
    prefixes: bool = False

    @property
    def expanded(self) -> int:
        """The most bytes that the values can take."""
        return self.size + self.largest * self.repeated


def _look_at(group: RowGroup, leaf: _Leaf, raw: BinaryIO, where: str) -> _Pages:
    """The pages of a column; CorpusError where one is too large, or there are too many values."""
    if leaf.number >= len(group.columns):
        raise ValueError("a row group without some of the columns")
    begin, packed = group.columns[leaf.number]
    found = _Pages(leaf, packed)
    for page in pages(raw, begin, packed):
        found.size += page.size
        if page.size > MOST_PAGE_BYTES:
            raise _refused(where, leaf, f"pages of at most {MOST_PAGE_BYTES:,} bytes", f"{page.size:,}")
        if page.kind == DICTIONARY:
            found.largest = max(found.largest, page.size)
            continue
        found.values += page.values
        if leaf.nested and found.values > MOST_VALUES:
            raise _refused(where, leaf, f"at most {MOST_VALUES:,} values", f"{found.values:,} and more")
        if page.encoding in BY_DICTIONARY or page.encoding == BY_PREFIX:
            found.repeated += page.values
            found.prefixes |= page.encoding == BY_PREFIX
        else:
            found.each = max(found.each, page.size / max(1, page.values))
    if found.prefixes:
        found.largest = max(found.largest, found.size)
    return found


def _rows_at_once(found: list[_Pages], n_rows: int, where: str) -> int | None:
    """How many rows of a row group to read at once, so that they take about `_BATCH_BYTES` at most.

    None: all, each text that is repeated held once, for no number of rows is known to be small enough.
    """
    texts = [pages for pages in found if pages.leaf.texts]
    large = [pages for pages in texts if pages.expanded > MOST_AT_ONCE]
    if any(pages.leaf.nested and pages.largest * pages.repeated > MOST_AT_ONCE for pages in large):
        for pages in large:
            if pages.prefixes:
                raise _refused(where, pages.leaf, "another encoding of lists", "DELTA_BYTE_ARRAY")
        total = sum(pages.size for pages in found)
        if total > MOST_AT_ONCE:
            expected = f"at most {MOST_AT_ONCE:,} bytes, where messages repeat"
            raise _refused(where, large[0].leaf, expected, f"{total:,}")
        return None
    # of the rows of a list no more is known than how long they are on average
    each = [
        pages.expanded / max(1, n_rows) if pages.leaf.nested else max(pages.each, pages.largest)
        for pages in texts
    ]
    return min([_ROWS, *(max(1, int(_BATCH_BYTES / max(1.0, size))) for size in each)])


def _refused(where: str, leaf: _Leaf, expected: str, found: str) -> CorpusError:
    return CorpusError(
        f"{where}, column '{leaf.path}': expected {expected}, found {found}",
        fix=f"check where the file comes from; one that is meant to be so: {_SMALLER_GROUPS}",
    )
