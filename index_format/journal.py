"""The journal of a build: a line per commit, each with its checksum, so that a torn last line is ignored."""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path
from typing import Any

from index_format.confined import open_inside
from index_format.durable import storage, write_all


class Journal:
    """An append-only file of JSON objects, one a line: ``<crc32 of the JSON, 8 hex digits> <JSON>``.

    Opening reads the entries up to the first line that is incomplete or fails its checksum; what follows is
    cut off, so that the next entry starts on a line of its own.
    """

    NAME = "journal.jsonl"

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries: list[dict[str, Any]] = []
        with storage(path, 0):
            self._fd = open_inside(path.parent, path.name, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        valid = 0
        with os.fdopen(os.dup(self._fd), "rb") as file:
            for line in file:
                entry = _decode(line)
                if entry is None:
                    break
                self.entries.append(entry)
                valid += len(line)
        os.ftruncate(self._fd, valid)

    def write(self, entry: dict[str, Any]) -> None:
        """Append one entry; it is on disk when this returns."""
        body = json.dumps(entry, sort_keys=True, separators=(",", ":")).encode()
        write_all(self._fd, b"%08x %s\n" % (zlib.crc32(body), body), self.path)
        with storage(self.path, len(body)):
            os.fsync(self._fd)
        self.entries.append(json.loads(body))

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _decode(line: bytes) -> dict[str, Any] | None:
    if len(line) < 10 or not line.endswith(b"\n"):
        return None
    body = line[9:-1]
    if line[:9] != b"%08x " % zlib.crc32(body):
        return None
    try:
        entry = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, dict) else None
