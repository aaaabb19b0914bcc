"""The document ids that a read has seen, so that no two documents share one; in bounded memory."""

from __future__ import annotations

import hashlib
import os
import struct
import tempfile
import weakref
from collections.abc import Iterable
from pathlib import Path

from index_format.durable import storage

# the place of ids that an index has already; that of a line is (number of its source) << 40 | line
_KNOWN = 1
_KEY = struct.Struct("<QQ")
_SLOT = struct.Struct("<QQQ")  # both halves of the key, and the place; 0 where the slot is free
_FIRST_BITS = 10
_MEMORY_BITS = 16  # of the largest table in memory, 1.6 MB; larger ones are files
_SPARE = 1 << 10  # slots behind the last one that a key can ask for
_PROBED = 6  # slots read at once; more than a lookup mostly needs
_MOVED = 1 << 14  # slots


class SeenIds:
    """Ids by 16-byte digest, with where each was first seen.

    A hash table of 24-byte slots, a third of them free or more, with linear probing. Beyond 43,000 ids it is
    a file without a name, read and written a few slots at a time: 36 to 72 bytes of disk an id, and as much
    page cache as the system has to spare.

    Parameters
    ----------
    known : iterable of str
        Ids taken from the start.
    directory : Path, optional
        Where that file is made; default: the system's temporary directory.

    Raises
    ------
    StorageFull      there is no space for the file
    """

    def __init__(self, known: Iterable[str] = (), directory: Path | None = None) -> None:
        self._names: list[str] = ["the index that is appended to"]
        self._number: dict[str, int] = {}
        self._directory = directory
        self._count = 0
        self._bits = _FIRST_BITS
        self._table = _Table(self._bits, directory)
        for name in known:
            self._place(*self._key(name), _KNOWN)

    def take(self, name: str, source: str, line: int) -> str | None:
        """None when the id is new and now taken; else where it was first seen."""
        number = self._number.get(source)
        if number is None:
            number = self._number[source] = len(self._names)
            self._names.append(source)
        first = self._place(*self._key(name), number << 40 | line)
        if not first:
            return None
        source_name = self._names[first >> 40]
        return source_name if first == _KNOWN else f"{source_name}:{first & (1 << 40) - 1}"

    @staticmethod
    def _key(name: str) -> tuple[int, int]:
        return _KEY.unpack(hashlib.blake2b(name.encode(), digest_size=16).digest())

    def _place(self, low: int, high: int, place: int) -> int:
        """Enter a key; 0 when it was new, else the place that it was entered with."""
        if 3 * self._count >= 2 << self._bits:
            self._grow()
        slot = low >> 64 - self._bits
        while data := self._table.read(slot, _PROBED):
            for found_low, found_high, found in _SLOT.iter_unpack(data):
                if not found:
                    self._table.write(slot, _SLOT.pack(low, high, place))
                    self._count += 1
                    return 0
                if found_low == low and found_high == high:
                    return found
                slot += 1
        self._grow()  # the spare slots are full
        return self._place(low, high, place)

    def _grow(self) -> None:
        old = self._table
        while True:
            self._bits += 1
            self._table = _Table(self._bits, self._directory)
            if self._move(old):
                return

    def _move(self, old: _Table) -> bool:
        """Enter the keys of `old` into the new table, from its beginning to its end; False when its spare
        slots do not suffice.

        Slots are numbered by the keys' leading bits, so keys keep their order; only within an unbroken run of
        taken slots it is any. Hence runs are moved whole.
        """
        import numpy as np

        shift = np.uint64(64 - self._bits)
        last = -1  # slot taken so far
        run = np.zeros((0, 3), np.uint64)  # the beginning of one that goes on in the next piece
        for start in range(0, old.slots, _MOVED):
            piece = np.frombuffer(old.read(start, _MOVED), "<u8").reshape(-1, 3)
            piece = np.concatenate([run, piece])
            free = np.flatnonzero(piece[:, 2] == 0)
            end = len(piece) if start + _MOVED >= old.slots else int(free[-1]) + 1 if len(free) else 0
            piece, run = piece[:end], piece[end:]
            taken = piece[piece[:, 2] != 0]
            if not len(taken):
                continue
            taken = taken[np.argsort(taken[:, 0], kind="stable")]
            steps = np.arange(len(taken))
            # each goes to the first slot behind the one before it that is not ahead of its own
            wanted = np.maximum((taken[:, 0] >> shift).astype(np.int64), last + 1)
            slots = np.maximum.accumulate(wanted - steps) + steps
            last = int(slots[-1])
            if last >= self._table.slots:
                return False
            moved = np.zeros((last + 1 - int(slots[0]), 3), "<u8")
            moved[slots - slots[0]] = taken
            self._table.write(int(slots[0]), moved.tobytes())
        return True


class _Table:
    """2**bits slots and the spare ones, all free at first; in memory, or in a file where they are many."""

    def __init__(self, bits: int, directory: Path | None) -> None:
        self.slots = (1 << bits) + _SPARE
        self._memory: bytearray | None = None
        self._directory = Path(tempfile.gettempdir()) if directory is None else directory
        if bits <= _MEMORY_BITS:
            self._memory = bytearray(self.slots * _SLOT.size)
        else:
            with tempfile.TemporaryFile(dir=directory) as file:
                self._fd = os.dup(file.fileno())
            weakref.finalize(self, os.close, self._fd)
            os.ftruncate(self._fd, self.slots * _SLOT.size)

    def read(self, slot: int, count: int) -> bytes | bytearray:
        """That many slots, or as many as there are."""
        start = slot * _SLOT.size
        if self._memory is not None:
            return self._memory[start : start + count * _SLOT.size]
        return os.pread(self._fd, count * _SLOT.size, start)

    def write(self, slot: int, data: bytes) -> None:
        start = slot * _SLOT.size
        if self._memory is not None:
            self._memory[start : start + len(data)] = data
            return
        done = 0
        with storage(self._directory, len(data)):
            while done < len(data):
                done += os.pwrite(self._fd, data[done:] if done else data, start + done)
