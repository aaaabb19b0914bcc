"""Divide a corpus into N parts: the bytes of its files, the lines and the rows of each.

Files lie one behind the other, each as long as it is on disk. Range i of N is what begins in the i-th of N
equal stretches, so that every document is in one range, and the ranges in turn are the corpus in order.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from stride_cli.errors import UsageError


@dataclass(frozen=True, slots=True)
class Share:
    """The part of one file in a range: what begins in bytes low … high-1 of `size` (0: as if it were 1).

    Lines of a compressed file and rows of a table lie in it as if each took as much of it as the next.
    """

    low: int
    high: int
    size: int

    def of(self, length: int) -> tuple[int, int]:
        """Return first and stop of those of 0 … length-1 (bytes as decompressed, or rows) that are in it."""
        return -(-self.low * length // self.size), -(-self.high * length // self.size)


@dataclass(frozen=True, slots=True)
class Range:
    """Part `number` (from 1) of `count`."""

    number: int
    count: int

    @classmethod
    def parse(cls, written: str) -> Range:
        """Read a range such as "2/8"; UsageError where it is none."""
        found = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", written)
        made = cls(int(found[1]), int(found[2])) if found else None
        if made is None or not 1 <= made.number <= made.count:
            raise UsageError(
                f"--range is '{written}', expected I/N: part I of N, of 1/N, 2/N … N/N",
                fix="try --range 1/8; in an array job of Slurm --range "
                '"$SLURM_ARRAY_TASK_ID/$SLURM_ARRAY_TASK_COUNT" with --array=1-8',
            )
        return made

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    def shares(self, sizes: Sequence[int]) -> list[Share | None]:
        """Return what it has of each file; None: nothing."""
        lengths = [max(1, size) for size in sizes]
        total = sum(lengths)
        first, stop = (total * place // self.count for place in (self.number - 1, self.number))
        found: list[Share | None] = []
        start = 0
        for length in lengths:
            low, high = max(0, first - start), min(length, stop - start)
            found.append(Share(low, high, length) if low < high else None)
            start += length
        return found
