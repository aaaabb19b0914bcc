"""Second moments of activations and gradients, and the leading directions that bases are made of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable

import scipy.linalg
import torch
import torch.nn.functional as F

from stride_cli.models.devices import total_bytes

_OF_DEVICE = 16  # the share of a device's memory that one space's moments may take: 1/16
_COLUMNS = 256  # of a moment, multiplied at once with themselves and those to their right


class Moments:
    """Second moments that one space collects of a sample, by keys of its own: ``Σ v vᵀ``, and how many v.

    They stay where the rows are; of a device that has no more room for them, the further ones do not.
    With `rounded`, rows in float32 are multiplied in bfloat16, and their products added up in float32.
    """

    def __init__(self, *, rounded: bool = False) -> None:
        self._low = torch.bfloat16 if rounded else torch.float32
        # of the upper triangle, the same as the lower one: _COLUMNS rows each, from the diagonal on
        self._panels: dict[Hashable, list[torch.Tensor]] = {}
        self._rows: Counter[Hashable] = Counter()
        self._bytes = 0

    def add(self, key: Hashable, rows: torch.Tensor, weight: torch.Tensor | None = None) -> None:
        """Add rows (N, d), each times its weight (N,); one of weight zero does not count. Their products are
        summed over N in their own precision, float32 at least."""
        rows = rows if rows.dtype == torch.float64 else rows.to(self._low)
        if weight is not None:
            rows = rows * weight[:, None].to(rows.dtype)
        self._rows[key] += len(rows) if weight is None else int(weight.count_nonzero())
        panels = self._panels.get(key) or self._panels.setdefault(key, self._zeros(rows))
        for number, panel in enumerate(panels):
            start = number * _COLUMNS
            left, right = rows[:, start : start + _COLUMNS].T, rows[:, start:]
            if (panel.dtype, panel.device) == (rows.dtype, rows.device):
                panel.addmm_(left, right)
            else:
                panel += (left @ right).to(panel.device)

    def _zeros(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """Make the panels of rows (N, d)."""
        width, kind = rows.shape[1], torch.promote_types(rows.dtype, torch.float32)
        sizes = [(min(_COLUMNS, width - start), width - start) for start in range(0, width, _COLUMNS)]
        self._bytes += sum(high * wide for high, wide in sizes) * kind.itemsize
        device = "cpu" if 0 < total_bytes(rows.device) // _OF_DEVICE < self._bytes else rows.device
        return [torch.zeros(size, dtype=kind, device=device) for size in sizes]

    def take(self, key: Hashable) -> torch.Tensor:
        """Hand over the upper triangle of ``Σ v vᵀ``, (d, d) float32 or float64; use nothing below it."""
        panels = self._panels.pop(key)
        width = panels[0].shape[1]
        return torch.cat([F.pad(each, (width - each.shape[1], 0)) for each in panels])

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
        some = size - rank, size - 1
        found = scipy.linalg.eigh(moment.float().numpy(), lower=False, subset_by_index=some)
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
