"""Remember the document ids of a read in bounded memory, so that no two documents share one."""

from __future__ import annotations

import errno
import hashlib
import os
import sqlite3
import tempfile
import weakref
from collections.abc import Iterable
from pathlib import Path

from index_format.durable import storage

# the place of ids that an index has already; that of a line is (number of its source) << 40 | line
_KNOWN = 1
_FEW = 20_000  # held in memory
_CACHE_KB = 4096
_OPENING = (
    "PRAGMA journal_mode = OFF",
    "PRAGMA synchronous = OFF",
    f"PRAGMA cache_size = -{_CACHE_KB}",
    "BEGIN",  # never committed: what the cache cannot hold goes to the file, and all of it with the read
    "CREATE TABLE seen (digest BLOB PRIMARY KEY, place INTEGER) WITHOUT ROWID",
)


class SeenIds:
    """Ids by 16-byte digest, with where each was first seen.

    The first 20,000 are in memory. More are in a SQLite table in a file without a name, some 40 bytes each.

    Args:
        known: Ids taken from the start.
        directory: Where that file is made; default: the system's temporary directory.

    Raises:
        StorageFull: There is no space for the file.
        OSError: It cannot be made in that directory.
    """

    def __init__(self, known: Iterable[str] = (), directory: Path | None = None) -> None:
        self._names: list[str] = ["the index that is appended to"]
        self._number: dict[str, int] = {}
        self._directory = Path(tempfile.gettempdir()) if directory is None else directory
        self._few: dict[bytes, int] = {}
        self._table: sqlite3.Connection | None = None
        for name in known:
            self._place(name, _KNOWN)

    def take(self, name: str, source: str, line: int) -> str | None:
        """Take an id; return None where it was free, else where it was first seen."""
        number = self._number.get(source)
        if number is None:
            number = self._number[source] = len(self._names)
            self._names.append(source)
        first = self._place(name, number << 40 | line)
        if first is None:
            return None
        source_name = self._names[first >> 40]
        return source_name if first == _KNOWN else f"{source_name}:{first & (1 << 40) - 1}"

    def _place(self, name: str, place: int) -> int | None:
        """Enter an id; return None where it was new, else the place that it was entered with."""
        digest = hashlib.blake2b(name.encode(), digest_size=16).digest()
        if self._table is None and len(self._few) < _FEW:
            first = self._few.get(digest)
            self._few.setdefault(digest, place)
            return first
        try:
            if self._table is None:
                self._table = self._open()
            if self._table.execute("INSERT OR IGNORE INTO seen VALUES (?, ?)", (digest, place)).rowcount:
                return None
        except sqlite3.OperationalError as error:
            code = errno.ENOSPC if error.sqlite_errorcode == sqlite3.SQLITE_FULL else errno.EIO
            with storage(self._directory, len(digest)):
                raise OSError(code, f"{os.strerror(code)}: {error}", str(self._directory)) from error
        (found,) = self._table.execute("SELECT place FROM seen WHERE digest = ?", (digest,)).fetchone()
        return int(found)

    def _open(self) -> sqlite3.Connection:
        """Make the table, with the ids that were in memory."""
        with storage(self._directory, 0), tempfile.NamedTemporaryFile(dir=self._directory) as file:
            # one thread may open what another reads
            table = sqlite3.connect(file.name, isolation_level=None, check_same_thread=False)
            weakref.finalize(self, table.close)
            for statement in _OPENING:
                table.execute(statement)
        table.executemany("INSERT INTO seen VALUES (?, ?)", self._few.items())
        self._few.clear()
        return table
