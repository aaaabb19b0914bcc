"""What a device has of memory, and batches that become smaller where it has too little."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import torch

from stride_cli.data.batches import Batch
from stride_cli.errors import out_of_memory
from stride_cli.output import note

_Found = TypeVar("_Found")


def free_bytes(device: torch.device) -> int | None:
    """Memory of a device that nobody uses now; None where that is not known."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    # what torch has taken of the device and does not use is free for us
    return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))


def size_in_words(count: int) -> str:
    """Bytes as people read them."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.3g} MB"


class ShrinkingBatches:
    """Batches that are halved where memory runs out, and stay that small from then on.

    What is computed of a batch must not have changed anything before it fails.
    """

    def __init__(self) -> None:
        self._most: int | None = None  # padded tokens at once, once there were too many

    def each(
        self, batches: Iterable[Batch], compute: Callable[[Batch], _Found]
    ) -> Iterator[tuple[Batch, _Found]]:
        """Batches with what `compute` makes of them; in their place parts, one after the other, where they
        are too large.

        Raises
        ------
        RuntimeError      there is no memory for a single row either: torch's own error
        """
        for batch in batches:
            waiting = self._parts(batch)
            while waiting:
                part = waiting.pop(0)
                found = self._try(part, compute)
                if found is None:
                    waiting[:0] = self._parts(part)
                else:
                    yield part, found[0]
                    del found  # before the next one needs the memory

    def _parts(self, batch: Batch) -> list[Batch]:
        count, length = batch.ids.shape
        if self._most is None or count * length <= self._most or count == 1:
            return [batch]
        rows = max(1, self._most // length)
        return [batch.take(slice(start, start + rows)) for start in range(0, count, rows)]

    def _try(self, part: Batch, compute: Callable[[Batch], _Found]) -> tuple[_Found] | None:
        try:
            return (compute(part),)
        except RuntimeError as error:
            count, length = part.ids.shape
            if count == 1 or not out_of_memory(error):
                raise
            self._most = length * (count // 2)
        # what the pass held until it failed went with its exception
        if torch.cuda.is_available():
            gc.collect()
            torch.cuda.empty_cache()
        note(f"out of memory at {count * length:,} tokens at once: going on with {self._most:,}")
        return None
