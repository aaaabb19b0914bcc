"""Memory: how much goes through a model at once; batches that are halved where there is too little."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch

from stride_cli.data.batches import TOGETHER, Batch
from stride_cli.errors import out_of_memory
from stride_cli.models.devices import total_bytes
from stride_cli.output import note

if TYPE_CHECKING:
    from stride_cli.models.protocol import AttributableModel
    from stride_cli.operators.operator_space import OperatorSpace

_Found = TypeVar("_Found")

_BATCH_BYTES = 1 << 28  # of what a batch leaves for its backward pass; on a GPU a quarter of its memory
_MOST_TOKENS = 1024  # of 4,096 a query held 400 MB more, and took as long
_MOST_TOKENS_ON_DEVICE = 65_536  # of fewer, a small model leaves most of a GPU idle
_GRADIENTS_OF_DEVICE = 32  # the share of a device's memory that gate gradients of one kind may take: 1/32
# numbers a token, block and width of a block that is differentiated, with what linear layers read and the
# gradients of what they give (SmolLM2-135M: 1.5 MB a token)
DIFFERENTIATED = 24


def free_bytes(device: torch.device) -> int | None:
    """Memory of a device that nobody uses now; None where that is not known."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    # what torch has taken of the device and does not use is free for us
    return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))


def resident_bytes(key: str = "VmRSS") -> int | None:
    """Read what this process holds, or has held at most (VmHWM); None where the system does not say."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(f"{key}:"):
                return int(line.split()[1]) * 1024
    return None


def size_in_words(count: int) -> str:
    """Bytes as people read them."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.3g} MB"


def tokens_at_once(
    model: AttributableModel, spaces: Iterable[OperatorSpace | type[OperatorSpace]], layer: int
) -> int:
    """Padded tokens of a batch whose gate gradients are taken: 1,024, or as many as memory is allowed for.

    Parameters
    ----------
    spaces : operator spaces, or their classes
    layer : int      where residual spaces act: the blocks above it are differentiated
    """
    sites = {space.site for space in spaces}
    blocks = model.n_layers if "layers" in sites else model.n_layers - layer if "residual" in sites else 0
    numbers = model.d_model * DIFFERENTIATED * blocks  # a token
    if model.device.type != "cuda":
        return max(1, min(_MOST_TOKENS, _BATCH_BYTES // max(1, 4 * numbers)))
    # half of what a CPU takes: fused kernels keep less (an H200 in bf16: at most .47 MB a token of .83)
    room = total_bytes(model.device) // 4
    return max(1, min(_MOST_TOKENS_ON_DEVICE, 2 * room // max(1, model.dtype.itemsize * numbers)))


def chunks_at_once(device: torch.device, gate_size: int) -> int:
    """Chunks whose gradients, p numbers each, are held together: 8, more where a device has room for them."""
    return max(TOGETHER, total_bytes(device) // _GRADIENTS_OF_DEVICE // max(1, 4 * gate_size))


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
