"""Tables written row by row: CSV for spreadsheets, Parquet for everything else."""

from __future__ import annotations

import contextlib
import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Protocol

from index_format.durable import replacing, storage
from stride_cli.characters import cell, printable
from stride_cli.errors import require_extra
from stride_cli.formats.columns import Column, Row

SUFFIXES = {
    ".csv": "csv", ".parquet": "parquet", ".pq": "parquet",
    ".sqlite": "sqlite", ".sqlite3": "sqlite", ".db": "sqlite",
    ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json",
}  # fmt: skip
_GROUP_ROWS = 10_000  # of Parquet's row groups; so many are held


class Table(Protocol):
    """What rows are added to; it is whole once its context is left."""

    def add(self, rows: Iterable[Row]) -> None: ...


class CsvTable:
    """A header and one line a row, at once; an empty cell is None.

    A text that a spreadsheet would run as a formula begins with an apostrophe, and what would steer a
    terminal is escaped.
    """

    def __init__(self, columns: Sequence[Column], out: IO[str]) -> None:
        self._out = out
        self._writer = csv.DictWriter(out, [column.name for column in columns], lineterminator="\n")
        self._writer.writeheader()

    def add(self, rows: Iterable[Row]) -> None:
        for row in rows:
            self._writer.writerow(
                {
                    name: cell(printable(value)) if isinstance(value, str) else value
                    for name, value in row.items()
                }
            )
        self._out.flush()


class ParquetTable:
    """Row groups of at most 10,000 rows; every column may have nulls."""

    def __init__(self, columns: Sequence[Column], out: Any) -> None:
        import pyarrow
        from pyarrow import parquet

        kinds = {str: pyarrow.string(), float: pyarrow.float64(), int: pyarrow.int64(), bool: pyarrow.bool_()}
        self._schema = pyarrow.schema([(column.name, kinds[column.kind]) for column in columns])
        self._writer = parquet.ParquetWriter(out, self._schema, compression="zstd")
        self._rows: list[Row] = []

    def add(self, rows: Iterable[Row]) -> None:
        self._rows += rows
        if len(self._rows) >= _GROUP_ROWS:
            self._write()

    def _write(self) -> None:
        import pyarrow

        self._writer.write_table(pyarrow.Table.from_pylist(self._rows, schema=self._schema))
        self._rows = []

    def close(self) -> None:
        if self._rows:
            self._write()
        self._writer.close()


def require_pyarrow() -> None:
    """MissingExtraError where Parquet cannot be written; asked before there is anything to write."""
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError:
        raise require_extra("pyarrow", "parquet") from None


@contextmanager
def table_at(kind: str, columns: Sequence[Column], path: Path) -> Iterator[Table]:
    """A table in a file, "csv" or "parquet", which is there once it is whole.

    Raises
    ------
    MissingExtraError       of Parquet, without pyarrow
    StorageFull
    """
    if kind == "parquet":
        require_pyarrow()
    with replacing(path) as fresh, storage(path, 0):
        if kind == "csv":
            with fresh.open("x", encoding="utf-8", newline="") as text:
                yield CsvTable(columns, text)
            return
        with fresh.open("xb") as binary, parquet_to(columns, binary) as table:
            yield table


@contextmanager
def parquet_to(columns: Sequence[Column], out: IO[bytes]) -> Iterator[Table]:
    """A Parquet table on a stream, which need not be able to go back; after an error it stays without an end,
    so that nobody takes it for whole."""
    require_pyarrow()
    stream = _Stream(out)
    table = ParquetTable(columns, stream)
    try:
        yield table
    except BaseException:
        stream.abandoned = True
        with contextlib.suppress(Exception):
            table.close()
        raise
    table.close()
    out.flush()


class _Stream(io.RawIOBase):
    """What is written to `out`, until it is abandoned; a ParquetWriter writes an end whatever happens."""

    def __init__(self, out: IO[bytes]) -> None:
        self._out = out
        self.abandoned = False

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return len(data) if self.abandoned else self._out.write(data)


def kind_by_suffix(path: Path, among: Sequence[str]) -> str | None:
    """The format that a file's name says, where it is one of these."""
    found = SUFFIXES.get(path.suffix.lower())
    return found if found in among else None


def not_a_character(value: Any) -> str:
    """Which text in a record no table can hold, for half of a surrogate pair is no character; or ""."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            return ascii(value[error.start])
        return ""
    within = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return next((found for each in within if (found := not_a_character(each))), "")
