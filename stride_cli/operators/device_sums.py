"""Sums over lists of columns on a device, and the folding and signs of `projections` made of them there."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from stride_cli.operators.fit_kernels import turns

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


class DeviceFolding:
    """`Folding` for gradients on a device.

    Each of the r numbers is the sum of a list of gates, the same each time, and so are signs.

    Parameters
    ----------
    places : (p,) int64        where each gate goes
    signs : (p,) float32    its sign, ±1
    flips : (r,) float32       ±1, between two turns
    device : torch.device
    """

    def __init__(
        self, places: np.ndarray, signs: np.ndarray, flips: np.ndarray, device: torch.device
    ) -> None:
        count = len(flips)
        self._sums = GatheredSums(places, signs, count, device)
        self._turns, self._flips = turns(count), torch.from_numpy(flips).to(device)

    def __call__(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """One (B, p) a space → (B, r) float32."""
        whole = torch.cat([gradient.float() for gradient in gradients], dim=1)
        whole = self._sums(whole)
        for number, (start, length) in enumerate(self._turns):
            if number:
                whole *= self._flips
            whole[:, start : start + length] = _turned(whole[:, start : start + length])
        return whole

    def encoded(
        self, gradients: Sequence[torch.Tensor], scored: torch.Tensor
    ) -> tuple[np.ndarray, np.ndarray]:
        """`projections.encode` of gradients times scored (B,): only codes and steps leave the device."""
        z = self(gradients) * scored[:, None].to(self._flips.device)
        size = z.abs().sum(dim=1)
        step = torch.where(size > 0, z.square().sum(dim=1) / size, 0)
        weights = torch.tensor([128, 64, 32, 16, 8, 4, 2, 1], dtype=torch.uint8).to(z.device)
        bits = (z > 0).view(len(z), -1, 8).to(torch.uint8)
        codes = (bits * weights).sum(dim=2, dtype=torch.uint8)
        return codes.cpu().numpy(), step.float().cpu().numpy()


def _turned(rows: torch.Tensor) -> torch.Tensor:
    """Turn all of the numbers, as `fit_kernels.turn`."""
    length = rows.shape[1]
    half = 1
    while half < length:
        pairs = rows.reshape(len(rows), length // (2 * half), 2, half)
        low, high = pairs[:, :, 0], pairs[:, :, 1]
        rows = torch.stack([low + high, low - high], dim=2)
        half *= 2
    return rows.reshape(len(rows), length).div_(float(length) ** 0.5)
