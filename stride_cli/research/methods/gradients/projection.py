"""Random and principal projections of per-example gradients, made layer by layer.

A two-sided projection P_out G P_inᵀ is applied to the factors of G = Σ δ ⊗ a, so that neither G nor a matrix
of (dim, parameters) exists (Choe et al. 2024, arXiv:2405.13954; Chang et al. 2024, arXiv:2410.17413). A dense
one (the Johnson–Lindenstrauss projection of TRAK) takes dim · parameters · 4 bytes and is for small models.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from stride_cli.randomness import stream
from stride_cli.research.methods.gradients.capture import Factors, Layer

DENSE_BYTES = 1 << 30  # a dense projection may take so much
_ROWS = 4096  # of a dense projection are drawn at a time


class Projector(Protocol):
    """Per-example gradients to vectors of `width` numbers; `spans[l]` are those of layer l."""

    width: int
    spans: list[slice]

    def add(self, found: Factors, target: Tensor) -> None:
        """Add the projected gradients of some rows at one layer to ``target`` (B, width) float32."""
        ...

    def add_matrices(self, layer: int, rows: slice, matrices: Tensor, target: Tensor) -> None:
        """Add those of explicit matrices (b, n_out, n_in)."""
        ...


class TwoSided:
    """P_out G P_inᵀ of every layer, flattened.

    Parameters
    ----------
    sides : sequence of (P_in (n_in, r_in), P_out (n_out, r_out)) float32, a pair per layer
    summed : bool
        All layers share one span of r_out · r_in numbers, the sum over layers (independent random projections
        keep the sum of inner products in expectation); all pairs must then have the same ranks.
    scales : sequence of (s_in (n_in,), s_out (n_out,)), optional
        Multiply inputs and output gradients beforehand: a factored diagonal preconditioner.
    """

    def __init__(
        self,
        sides: Sequence[tuple[Tensor, Tensor]],
        *,
        summed: bool = False,
        scales: Sequence[tuple[Tensor, Tensor]] | None = None,
    ) -> None:
        if scales is not None:
            sides = [
                (p_in * s_in[:, None], p_out * s_out[:, None])
                for (p_in, p_out), (s_in, s_out) in zip(sides, scales, strict=True)
            ]
        self.sides = list(sides)
        widths = [p_in.shape[1] * p_out.shape[1] for p_in, p_out in sides]
        if summed:
            self.spans = [slice(0, widths[0])] * len(widths)
            self.width = widths[0]
        else:
            ends = np.cumsum([0, *widths])
            self.spans = [slice(int(a), int(b)) for a, b in itertools.pairwise(ends)]
            self.width = int(ends[-1])

    def add(self, found: Factors, target: Tensor) -> None:
        p_in, p_out = self.sides[found.layer]
        small = torch.bmm((found.outputs @ p_out).transpose(1, 2), found.inputs @ p_in)
        target[found.rows, self.spans[found.layer]] += small.flatten(1)

    def add_matrices(self, layer: int, rows: slice, matrices: Tensor, target: Tensor) -> None:
        p_in, p_out = self.sides[layer]
        target[rows, self.spans[layer]] += (p_out.T @ (matrices @ p_in)).flatten(1)


class Dense:
    """Random signs over √dim, independent for every parameter; the sum over layers is the projection of the
    whole gradient.

    Parameters
    ----------
    layers : sequence of Layer
    dim : int
    seed, name, number : of the stream that draws them
    device : torch.device
    """

    def __init__(
        self, layers: Sequence[Layer], dim: int, seed: int, name: str, number: int, device: torch.device
    ) -> None:
        self.width = dim
        self.spans = [slice(0, dim)] * len(layers)
        self._matrices = []
        for layer_number, layer in enumerate(layers):
            matrix = torch.empty(layer.size, dim, device=device)
            random = stream(seed, name, number, layer_number)
            for start in range(0, layer.size, _ROWS):
                rows = min(_ROWS, layer.size - start)
                bits = np.unpackbits(random.integers(0, 256, -(-rows * dim // 8), dtype=np.uint8))
                signs = torch.from_numpy(bits[: rows * dim].reshape(rows, dim)).to(device)
                matrix[start : start + rows] = (signs.float() * 2 - 1) / dim**0.5
            self._matrices.append(matrix)

    def add(self, found: Factors, target: Tensor) -> None:
        for block in found.blocks():
            self.add_matrices(found.layer, block.rows, block.gradients(), target)

    def add_matrices(self, layer: int, rows: slice, matrices: Tensor, target: Tensor) -> None:
        target[rows] += matrices.flatten(1) @ self._matrices[layer]


def random_sides(
    layers: Sequence[Layer], rank: int, seed: int, name: str, number: int, device: torch.device
) -> list[tuple[Tensor, Tensor]]:
    """Draw orthonormal columns times √(n / r), which keep inner products in expectation; the whole space,
    turned, where rank ≥ n."""
    return [
        (
            _orthonormal(layer.n_in, rank, stream(seed, name, number, place, 0)).to(device),
            _orthonormal(layer.n_out, rank, stream(seed, name, number, place, 1)).to(device),
        )
        for place, layer in enumerate(layers)
    ]


def principal_sides(covariances: Sequence[tuple[Tensor, Tensor]], rank: int) -> list[tuple[Tensor, Tensor]]:
    """Take leading eigenvectors of the covariances (A (n_in, n_in), S (n_out, n_out)) of each layer."""
    return [(_leading(a, rank), _leading(s, rank)) for a, s in covariances]


def random_projector(
    layers: Sequence[Layer], dim: int, seed: int, name: str, number: int, device: torch.device
) -> Projector:
    """Draw a projection of the whole gradient to about ``dim`` numbers.

    It is dense where that takes at most 1 GiB. Otherwise it sums two-sided projections of rank √dim: much
    cheaper, with more variance.
    """
    if 4 * sum(layer.size for layer in layers) * dim <= DENSE_BYTES:
        return Dense(layers, dim, seed, name, number, device)
    rank = max(1, round(dim**0.5))
    sides = random_sides(layers, rank, seed, name, number, device)
    return TwoSided([(_widen(p_in, rank), _widen(p_out, rank)) for p_in, p_out in sides], summed=True)


def _orthonormal(size: int, rank: int, random: np.random.Generator) -> Tensor:
    rank = min(size, rank)
    columns, _ = np.linalg.qr(random.standard_normal((size, rank), dtype=np.float32))
    return torch.from_numpy(np.ascontiguousarray(columns) * np.float32((size / rank) ** 0.5))


def _leading(matrix: Tensor, rank: int) -> Tensor:
    return torch.linalg.eigh(matrix)[1].flip(1)[:, :rank].float()


def _widen(columns: Tensor, rank: int) -> Tensor:
    """Zero columns up to the rank, for layers that have fewer."""
    return torch.nn.functional.pad(columns, (0, rank - columns.shape[1]))
