"""Second moments of activations and gradients, and the leading directions that bases are made of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
from typing import Any

import torch


class Moments:
    """What one space collects of a sample, by keys of its own: ``Σ v vᵀ`` of rows v, and how many."""

    def __init__(self) -> None:
        self._sums: dict[Hashable, torch.Tensor] = {}
        self._rows: Counter[Hashable] = Counter()

    def add(self, key: Hashable, rows: torch.Tensor, *, single: bool = False) -> None:
        """Add rows (N, d): their products are summed over N in float64, or in float32 where `single`."""
        rows = rows if single else rows.double()
        own = (rows.T @ rows).double().cpu()  # (d, d)
        self._sums[key] = self._sums[key] + own if key in self._sums else own
        self._rows[key] += len(rows)

    def __getitem__(self, key: Hashable) -> torch.Tensor:
        """``Σ v vᵀ``, (d, d) float64 on the CPU."""
        return self._sums[key]

    def rows(self, key: Hashable) -> int:
        """How many rows were added."""
        return self._rows[key]

    def state(self) -> dict[str, dict[Hashable, Any]]:
        """What `merge` adds elsewhere: sums and rows by key."""
        return {"sums": dict(self._sums), "rows": dict(self._rows)}

    def merge(self, state: Mapping[str, Mapping[Hashable, Any]]) -> None:
        """Add what another one collected of other rows."""
        for key, own in state["sums"].items():
            self._sums[key] = self._sums[key] + own if key in self._sums else own
        self._rows.update(state["rows"])


def leading_directions(moment: torch.Tensor, rank: int, damping: float | None = None) -> torch.Tensor:
    """Leading eigenvectors of a second moment (d, d), (d, rank) float32, each with a positive largest entry.

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
    return leading.float()
