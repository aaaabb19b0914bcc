"""Second moments of activations and gradients, and the leading directions that bases are made of."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable

import scipy.linalg
import torch

from stride_cli.models.devices import total_bytes

_OF_DEVICE = 16  # the share of a device's memory that one space's moments may take: 1/16
_COLUMNS = 256  # of a moment, multiplied at once with themselves and those to their right
_ROWS = 1024  # multiplied together: of fewer, adding their product up takes as long as making it


class Moments:
    """Second moments that one space collects of a sample, by keys of its own: ``Σ v vᵀ``, and how many v.

    They stay where the rows are; of a device that has no more room for them, the further ones do not.
    With `rounded`, rows in float32 are multiplied in bfloat16, and their products added up in float32.
    """

    def __init__(self, *, rounded: bool = False) -> None:
        self._low = torch.bfloat16 if rounded else torch.float32
        self._sums: dict[Hashable, torch.Tensor] = {}  # the upper triangle: the lower one is the same
        self._waiting = defaultdict[Hashable, list[torch.Tensor]](list)
        self._rows: Counter[Hashable] = Counter()
        self._bytes = 0

    def add(self, key: Hashable, rows: torch.Tensor, weight: torch.Tensor | None = None) -> None:
        """Add rows (N, d), each times its weight (N,); one of weight zero does not count. Their products are
        summed over N in their own precision, float32 at least."""
        rows = rows if rows.dtype == torch.float64 else rows.to(self._low)
        if weight is not None:
            rows = rows * weight[:, None].to(rows.dtype)
        self._rows[key] += len(rows) if weight is None else int(weight.count_nonzero())
        self._waiting[key].append(rows)
        if sum(map(len, self._waiting[key])) >= _ROWS:
            self._multiply(key)

    def _multiply(self, key: Hashable) -> None:
        """Add up the products of the rows that wait."""
        rows = torch.cat(self._waiting.pop(key))
        if key not in self._sums:
            own = rows.new_zeros(2 * rows.shape[1:], dtype=torch.promote_types(rows.dtype, torch.float32))
            self._bytes += own.nbytes
            room = total_bytes(own.device) // _OF_DEVICE
            self._sums[key] = own.cpu() if 0 < room < self._bytes else own
        total = self._sums[key]
        for start in range(0, len(total), _COLUMNS):
            own = rows[:, start : start + _COLUMNS].T @ rows[:, start:]
            total[start : start + _COLUMNS, start:] += own.to(total.device)

    def __getitem__(self, key: Hashable) -> torch.Tensor:
        """Return the upper triangle of ``Σ v vᵀ``, (d, d) float32 or float64; nothing of use is below it."""
        if key in self._waiting:
            self._multiply(key)
        return self._sums[key]

    def rows(self, key: Hashable) -> int:
        """Count the rows that were added with a weight."""
        return self._rows[key]


def leading_directions(moment: torch.Tensor, rank: int, damping: float | None = None) -> torch.Tensor:
    """Leading eigenvectors of a second moment (d, d), by its upper triangle, found where that is: (d, rank)
    float32 on the CPU, each with a positive largest entry.

    With a damping they are divided by the root of (eigenvalue + damping × mean eigenvalue): the columns of
    E (Λ + γ I)^{−1/2}, with which a vector's coordinates have a second moment close to the identity.
    """
    size = len(moment)
    if moment.device.type == "cpu" and 4 * rank <= size:  # a few of them alone: a sixth of the time of all
        found = scipy.linalg.eigh(
            moment.float().numpy(), lower=False, subset_by_index=(size - rank, size - 1)
        )
        values, vectors = map(torch.from_numpy, found)
    else:
        values, vectors = torch.linalg.eigh(moment.double(), UPLO="U")
    leading = vectors.flip(1)[:, :rank]  # they are ascending
    # an eigenvector's sign is free
    largest = leading.gather(0, leading.abs().argmax(dim=0, keepdim=True))
    leading = leading * largest.sign()
    if damping is not None:
        spread = values.flip(0)[:rank].clamp_min(0) + damping * float(moment.trace()) / size
        leading = leading / spread.clamp_min(torch.finfo(torch.float32).tiny).sqrt()
    return leading.float().cpu()
