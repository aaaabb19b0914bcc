"""Second moments of activations and gradients, and the leading directions that bases are made of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable

import torch

from stride_cli.models.devices import total_bytes

_OF_DEVICE = 16  # the share of a device's memory that one space's moments may take: 1/16


class Moments:
    """Second moments that one space collects of a sample, by keys of its own: ``Σ v vᵀ``, and how many v.

    They stay where the rows are; of a device that has no more room for them, the further ones do not.
    """

    def __init__(self) -> None:
        self._sums: dict[Hashable, torch.Tensor] = {}
        self._rows: Counter[Hashable] = Counter()
        self._bytes = 0

    def add(self, key: Hashable, rows: torch.Tensor, *, single: bool = False) -> None:
        """Add rows (N, d): their products are summed over N in float64, or in float32 where `single`."""
        rows = rows if single else rows.double()
        own = (rows.T @ rows).double()  # (d, d)
        if key in self._sums:
            self._sums[key] += own.to(self._sums[key].device)
        else:
            self._bytes += own.nbytes
            room = total_bytes(own.device) // _OF_DEVICE
            self._sums[key] = own.cpu() if 0 < room < self._bytes else own
        self._rows[key] += len(rows)

    def __getitem__(self, key: Hashable) -> torch.Tensor:
        """``Σ v vᵀ``, (d, d) float64."""
        return self._sums[key]

    def rows(self, key: Hashable) -> int:
        """Count the rows that were added."""
        return self._rows[key]


def leading_directions(moment: torch.Tensor, rank: int, damping: float | None = None) -> torch.Tensor:
    """Leading eigenvectors of a second moment (d, d), found where that is: (d, rank) float32 on the CPU, each
    with a positive largest entry.

    With a damping they are divided by the root of (eigenvalue + damping × mean eigenvalue): the columns of
    E (Λ + γ I)^{−1/2}, with which a vector's coordinates have a second moment close to the identity.
    """
    values, vectors = torch.linalg.eigh(moment)  # ascending
    leading = vectors.flip(1)[:, :rank]
    # an eigenvector's sign is free
    largest = leading.gather(0, leading.abs().argmax(dim=0, keepdim=True))
    leading = leading * largest.sign()
    if damping is not None:
        spread = values.flip(0)[:rank].clamp_min(0) + damping * float(values.mean())
        leading = leading / spread.clamp_min(torch.finfo(torch.float32).tiny).sqrt()
    return leading.float().cpu()
