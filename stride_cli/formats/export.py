"""Saved records as one file of another format, whole or not at all."""

from __future__ import annotations

import errno
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from index_format.durable import replacing, storage
from stride_cli.errors import QueryError, StorageError, UsageError
from stride_cli.formats.columns import hit_columns, hit_rows, tables
from stride_cli.formats.options import TARGETS
from stride_cli.formats.saved_records import Wanted, parse_records
from stride_cli.formats.table_files import not_a_character, table_at

ANSWER, AUDIT, BAD_INPUT = "stride.answer/1", "stride.audit/1", "stride.bad_input/1"
_FIX = "save records with: stride query --file prompts.jsonl --json > answers.jsonl (or stride audit --json)"
_WANTED = Wanted((ANSWER, AUDIT, BAD_INPUT), fix=_FIX)
Lines = tuple[str, Iterable[str]]  # what a file is called, and what is in it


def export(files: Iterable[Lines], to: str, out: Path) -> Counter[str]:
    """Write the records in files as a SQLite database, or as one CSV or Parquet table.

    A table has a row a hit (`hit_columns`) or a row an item of an audit; it holds one kind, and no input
    that had no result. Memory: one record (of Parquet: 10,000 rows).

    Parameters
    ----------
    files : of (name, lines)    lines as for `parse_records`
    to : one of `TARGETS`
    out :                       what is there is replaced once all is written, and stays if an error comes

    Returns
    -------
    Counter     of "answers", "hits", "audited" and "bad_inputs"

    Raises
    ------
    QueryError          a line is no such record, or a damaged one; there is none at all; a table would hold
                        two kinds
    MissingExtraError   Parquet without pyarrow
    StorageError        SQLite cannot write there
    """
    counts: Counter[str] = Counter()
    records = _counted(_all_of(files), counts)
    if to == "sqlite":
        _to_sqlite((record for _, record in records), out)
    elif to in TARGETS:
        _to_table(records, to, out)
    else:
        raise UsageError(f"there is no format '{to}' (expected {', '.join(TARGETS)})", fix="--to sqlite")
    return counts


def _all_of(files: Iterable[Lines]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every record with where it stands."""
    names = []
    for name, lines in files:
        names.append(name)
        for number, record in parse_records(lines, name, _WANTED):
            where = f"{name}:{number}"
            if found := not_a_character(record):
                raise QueryError(
                    f"{where} has half of a surrogate pair ({found}), which is no character", fix=_FIX
                )
            yield where, record


def _counted(
    records: Iterable[tuple[str, dict[str, Any]]], counts: Counter[str]
) -> Iterator[tuple[str, dict[str, Any]]]:
    for where, record in records:
        kind = record["schema"]
        if kind == ANSWER:
            counts["answers"] += 1
            counts["hits"] += len(record["hits"]) + len(record["opposers"])
        else:
            counts["audited" if kind == AUDIT else "bad_inputs"] += 1
        yield where, record
    if not counts:
        raise QueryError("there is no record in what was given (expected one or more)", fix=_FIX)


def _to_sqlite(records: Iterable[Mapping[str, Any]], out: Path) -> None:
    with replacing(out) as fresh, storage(out, 0), _sqlite_errors(out):
        from stride_cli.formats.database import Database

        database = Database(fresh)
        try:
            for record in records:
                database.add(record)
            database.close()
        finally:
            database.abandon()


@contextmanager
def _sqlite_errors(out: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
            raise OSError(errno.ENOSPC, "no space left") from error
        raise StorageError(
            f"SQLite cannot write {out}: {error}", fix="give another place with --out"
        ) from error


def _to_table(records: Iterator[tuple[str, dict[str, Any]]], to: str, out: Path) -> None:
    results = ((where, record) for where, record in records if record["schema"] != BAD_INPUT)
    first = next(results, None)
    if first is None:
        raise QueryError("there is no answer and no item of an audit in what was given", fix=_FIX)
    kind = first[1]["schema"]
    columns = hit_columns() if kind == ANSWER else tables()[AUDIT]
    rows_of = _rows_of_answers() if kind == ANSWER else _row_of_item
    with table_at(to, columns, out) as table:
        table.add(rows_of(first[1]))
        for where, record in results:
            if record["schema"] != kind:
                raise QueryError(
                    f"{where} is a {record['schema']} record after {kind} (expected one kind in a table)",
                    fix="export them apart, or --to sqlite, which has a table for each",
                )
            table.add(rows_of(record))


def _rows_of_answers() -> Callable[[Mapping[str, Any]], Sequence[dict[str, Any]]]:
    numbers = iter(range(1, 2**63))
    return lambda answer: hit_rows(answer, next(numbers))


def _row_of_item(record: Mapping[str, Any]) -> Sequence[dict[str, Any]]:
    return [{column.name: column.of(record) for column in tables()[AUDIT]}]
