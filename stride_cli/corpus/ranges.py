"""The i-th of N parts of a corpus: which bytes of its files, and which lines or rows, these are.

Files lie one behind the other, each as long as it is on disk. Range i of N is what begins in the i-th of N
equal stretches, so that every document is in one range, and the ranges in turn are the corpus in order.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from stride_cli.errors import UsageError

_WRITTEN = re.compile(r"([0-9]{1,9})/([0-9]{1,9})")


@dataclass(frozen=True, slots=True)
class Share:
    """What a range has of one file: what begins in bytes low … high-1 of `size` (0: a file is as if of 1).

    Lines of a compressed file and rows of a table lie in it as if each took as much of it as the next.
    """

    low: int
    high: int
    size: int

    def of(self, length: int) -> tuple[int, int]:
        """Those of 0 … length-1 (bytes as decompressed, or rows) that are in it: first, stop."""
        return -(-self.low * length // self.size), -(-self.high * length // self.size)

    @property
    def whole(self) -> bool:
        return self.low == 0 and self.high == self.size


@dataclass(frozen=True, slots=True)
class Range:
    """Part `number` (from 1) of `count`."""

    number: int
    count: int

    @classmethod
    def parse(cls, written: str) -> Range:
        """Of "2/8"; UsageError where it is none."""
        found = _WRITTEN.fullmatch(written)
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
        """What it has of each file; None: nothing."""
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
