"""Numbers added up in lists, on a device: what a sketch does with gates, and buckets with tokens."""

from __future__ import annotations

import numpy as np
import torch

_NUMBERS = 64 << 20  # gathered at once


class GatheredSums:
    """Column j of the result is ``Σ_{i: place_i = j} sign_i x_i``: every place gathers its columns.

    Nothing is added to from two sides at once, so that sums are the same each time, which those of numbers
    scattered to their places are not.

    Parameters
    ----------
    places : (p,) integers     where each column goes, 0 … count − 1
    signs : (p,) float32
    count : number of places
    device : torch.device
    """

    def __init__(self, places: np.ndarray, signs: np.ndarray, count: int, device: torch.device) -> None:
        order = np.argsort(places, kind="stable")
        columns = np.bincount(places, minlength=count)  # of each place
        # (count, m): the columns of each place, one after the other; those that have fewer end with a 0
        row = np.repeat(np.arange(count), columns)
        within = np.arange(len(places)) - np.repeat(np.cumsum(columns) - columns, columns)
        which = np.zeros((count, int(columns.max())), np.int64)
        own = np.zeros(which.shape, np.float32)
        which[row, within] = order
        own[row, within] = signs[order]
        self.device = device
        self._which = torch.from_numpy(which.reshape(-1)).to(device)
        self._signs = torch.from_numpy(own).to(device)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """(N, p, …) float32 → (N, count, …)."""
        rest = rows.shape[2:]
        signs = self._signs.view(*self._signs.shape, *(1 for _ in rest))  # (count, m, …)
        parts = []
        for some in rows.split(max(1, _NUMBERS // (len(self._which) * rest.numel()))):
            gathered = some.index_select(1, self._which).view(len(some), *self._signs.shape, *rest)
            parts.append(gathered.mul_(signs).sum(dim=2))
        return torch.cat(parts)
