"""Records as a SQLite database, which `datasette` and any other program that knows SQL opens."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stride_cli.formats.columns import Column, listed_hits, tables

_TYPES = {str: "TEXT", float: "REAL", int: "INTEGER", bool: "INTEGER"}
# record → its table, the key of that and what it is looked up by
_TABLES = {
    "stride.answer/1": ("answers", "answer", ("id", "verdict")),
    "stride.hit/1": ("hits", "hit", ("answer", "document", "influence")),
    "stride.audit/1": ("audits", "audit", ("item", "verdict", "q")),
    "stride.bad_input/1": ("bad_inputs", "bad_input", ()),
}
# table → its key and the texts that are searched in
_SEARCHED = {"answers": ("answer", ("prompt", "response")), "hits": ("hit", ("document", "passage"))}


class Database:
    """A new database: tables ``answers``, ``hits`` (of an answer each), ``audits`` and ``bad_inputs``.

    Columns are the keys of the records, those of objects within them joined by underscores; `stride schema`
    says what they mean. Full-text tables ``answers_fts`` and ``hits_fts``, where SQLite can.

    Parameters
    ----------
    path : Path     of a file that is not there; nothing is left of it but what `close` has made whole
    """

    def __init__(self, path: Path) -> None:
        self._connection = sqlite3.connect(path, isolation_level=None)
        # until it is whole nobody else sees it, and nobody wants what a crash left
        self._run("PRAGMA journal_mode = OFF")
        self._run("PRAGMA synchronous = OFF")
        self._run("PRAGMA foreign_keys = ON")
        self._run("BEGIN")
        for record, (table, key, _) in _TABLES.items():
            columns = [f"{key} INTEGER PRIMARY KEY"]
            if table == "hits":
                columns.append("answer INTEGER NOT NULL REFERENCES answers (answer)")
            columns += [f'"{column.name}" {_TYPES[column.kind]}' for column in tables()[record]]
            self._run(f"CREATE TABLE {table} ({', '.join(columns)})")

    def _run(self, statement: str, values: Sequence[Any] = ()) -> int:
        return int(self._connection.execute(statement, values).lastrowid or 0)

    def add(self, record: Mapping[str, Any]) -> None:
        """A ``stride.answer/1`` with its hits, ``stride.audit/1`` or ``stride.bad_input/1`` record."""
        number = self._insert(record["schema"], record)
        if record["schema"] == "stride.answer/1":
            for hit in listed_hits(record):
                self._insert("stride.hit/1", hit, answer=number)

    def _insert(self, name: str, record: Mapping[str, Any], **more: int) -> int:
        columns: tuple[Column, ...] = tables()[name]
        names = [*more, *(f'"{column.name}"' for column in columns)]
        values = [*more.values(), *(column.of(record) for column in columns)]
        marks = ", ".join("?" * len(names))
        return self._run(f"INSERT INTO {_TABLES[name][0]} ({', '.join(names)}) VALUES ({marks})", values)

    def close(self) -> None:
        """Add what finds rows quickly; the file is whole then."""
        for table, _, looked_up in _TABLES.values():
            for column in looked_up:
                self._run(f'CREATE INDEX {table}_{column} ON {table} ("{column}")')
        if self._connection.execute("SELECT sqlite_compileoption_used('ENABLE_FTS5')").fetchone()[0]:
            for table, (key, texts) in _SEARCHED.items():
                names = ", ".join(texts)
                self._run(
                    f"CREATE VIRTUAL TABLE {table}_fts USING fts5"
                    f'({names}, content="{table}", content_rowid="{key}")'
                )
                self._run(f"INSERT INTO {table}_fts ({table}_fts) VALUES ('rebuild')")
        self._run("COMMIT")
        self._connection.close()

    def abandon(self) -> None:
        """Let go of the file, which is not whole."""
        self._connection.close()
