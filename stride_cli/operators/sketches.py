"""Sketches: of every chunk's gate gradient the signs along the corpus's leading gradient directions.

    z_i = V h(share_i g_i),     kept of chunk i:  sign(z_i), mean |z_ij|
    g_i · g_x  ≈  z_i · V h(g_x)  ≈  mean |z_ij| · Σ_j sign(z_ij) (V h(g_x))_j

h folds the p gates of all spaces, in random order and with random signs, into 8,192 numbers, whose products
are those of the gates up to noise (Weinberger et al., ICML 2009); the rows of V (m × 8,192) are the leading
principal directions of h over a sample of the corpus. That is m / 8 + 4 bytes a chunk, and 8 m kilobytes in
all: unlike what K subsets answer, it does not say less where chunks are many and subsets few. Only what is
kept of the chunks is rounded to signs (Charikar, STOC 2002).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from stride_cli.corpus.gate_budget import FOLDED
from stride_cli.operators.gates import PackedGates, gate_responses
from stride_cli.randomness import stream

_SIGNS = np.where(np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1), 1, -1).astype(np.float32)


class Folding:
    """h: gates of all spaces → 8,192 numbers.

    Parameters
    ----------
    sizes : p of each space
    seed : int      names the random order and signs
    """

    def __init__(self, sizes: Sequence[int], seed: int) -> None:
        self._orders, self._signs = [], []
        for number, size in enumerate(sizes):
            random = stream(seed, "sketch folding", number)
            self._orders.append(torch.from_numpy(random.permutation(size)))
            self._signs.append(torch.from_numpy(random.choice(np.array([-1, 1], np.float32), size)))

    def __call__(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """One (B, p) a space → (B, 8192) float32, on the CPU."""
        total = torch.zeros(len(gradients[0]), FOLDED)
        for gradient, order, sign in zip(gradients, self._orders, self._signs, strict=True):
            # gates j, j + 8192, … of the shuffled order fall together: E[h(u) · h(v)] = u · v
            mixed = gradient.float().cpu()[:, order] * sign
            short = -mixed.shape[1] % FOLDED
            total += torch.nn.functional.pad(mixed, (0, short)).view(len(mixed), -1, FOLDED).sum(dim=1)
        return total


@dataclass(frozen=True)
class Sketches:
    """m bits of every chunk.

    Attributes
    ----------
    codes : (n, ⌈m / 8⌉) uint8      bit j, the highest first: whether z_ij is positive
    step : (n,) float32             mean |z_ij|
    directions : PackedGates        V, (m, 8192)
    seed : int                      of the folding
    """

    codes: np.ndarray
    step: np.ndarray
    directions: PackedGates
    seed: int

    @property
    def bits(self) -> int:
        """m."""
        return len(self.directions)

    @property
    def nbytes(self) -> int:
        return int(self.codes.nbytes + self.step.nbytes + self.directions.nbytes)

    def products(self, gradients: Sequence[torch.Tensor]) -> np.ndarray:
        """Estimates of ``share_i g_i · g_q``, of every chunk.

        Parameters
        ----------
        gradients : one (Q, p) float32 a space      g_q

        Returns
        -------
        ndarray (Q, n) float32
        """
        from stride_cli.operators.gate_kernels import table_sums

        # V h(g_q), (Q, m): the query's coordinates are not rounded, and where m is no multiple of 8, the bits
        # behind it count nothing
        folding = Folding([gradient.shape[1] for gradient in gradients], self.seed)
        weights = np.zeros((len(gradients[0]), 8 * self.codes.shape[1]), np.float32)
        weights[:, : self.bits] = gate_responses(self.directions, folding(gradients).numpy())
        found = np.empty((len(weights), len(self.codes)), np.float32)
        for row, own in zip(found, weights, strict=True):
            # what each value of each byte adds, (m / 8, 256): eight numbers under 256 patterns of signs
            table_sums(self.codes, own.reshape(-1, 8) @ _SIGNS.T, row)
            row *= self.step  # mean |z_ij| in place of each |z_ij|
        return found


def encode(coordinates: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes (t, ⌈m / 8⌉) uint8 and steps (t,) float32 of coordinates z (t, m)."""
    return np.packbits(coordinates > 0, axis=1), np.abs(coordinates).mean(axis=1).astype(np.float32)
