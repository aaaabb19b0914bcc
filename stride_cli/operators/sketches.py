"""Sketches: one bit of each chunk's gate gradient for every leading direction of the subsets' gates.

The gates A (K × p, all spaces side by side) are means of chunks' gradients, so their leading principal
directions are about those of the gradients:

    A = U S Vᵀ,      z_i = share_i S⁻¹ Vᵀ g_i,      sketch of chunk i:  sign(z_i),  mean |z_ij|

A query's own coordinates need neither V nor its gradient: Vᵀ g_x = S⁻¹ Uᵀ A g_x = S⁻¹ Uᵀ y, with y what the
subsets answer. So

    g_i · g_x  ≈  z_i · Uᵀ y  ≈  mean |z_ij| · Σ_j sign(z_ij) (Uᵀ y)_j,

and all that is kept beside m / 8 + 4 bytes of every chunk are K m numbers. (Signs: Charikar, STOC 2002, here
along data's own directions; only the chunk's side is rounded.)
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from stride_cli.errors import NumericalError
from stride_cli.operators.gates import Gates, gate_rows
from stride_cli.operators.gradients import gradient_products
from stride_cli.operators.saving import save_atomically
from stride_cli.output import note, progress

if TYPE_CHECKING:
    from stride_cli.models.adapter import CausalLM
    from stride_cli.operators.batches import ChunkReader
    from stride_cli.operators.spaces import OperatorSpace

_CHUNKS_AT_ONCE = 256
_COLUMNS_AT_ONCE = 1 << 16
_SMALLEST = 1e-6  # squares of singular values below this share of the largest are rounding
_SIGNS = np.where(np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1), 1.0, -1.0)


@dataclass(frozen=True)
class Sketches:
    """m bits of every chunk.

    Attributes
    ----------
    codes : (n, ⌈m / 8⌉) uint8       bit j, the highest first: whether z_ij is positive
    step : (n,) float32              mean |z_ij|
    combination : (K, m) float32     U
    """

    codes: np.ndarray
    step: np.ndarray
    combination: np.ndarray

    @property
    def bits(self) -> int:
        """m."""
        return int(self.combination.shape[1])

    @property
    def nbytes(self) -> int:
        return int(self.codes.nbytes + self.step.nbytes + self.combination.nbytes)

    def products(self, responses: np.ndarray) -> np.ndarray:
        """Estimates of ``share_i g_i · g_q``, of every chunk.

        Parameters
        ----------
        responses : (Q, K) float64      a_k · g_q, as `measure_linear` returns them

        Returns
        -------
        ndarray (Q, n) float32
        """
        from stride_cli.operators.gate_kernels import table_sums

        found = np.empty((len(responses), len(self.codes)), np.float32)
        weights = np.zeros((len(responses), 8 * self.codes.shape[1]), np.float32)
        weights[:, : self.bits] = responses @ self.combination
        for row, own in zip(found, weights, strict=True):
            # what each value of each byte adds
            table = own.reshape(-1, 8) @ _SIGNS.T.astype(np.float32)
            table_sums(self.codes, table, row)
            row *= self.step
        return found


def principal_directions(gates: Sequence[Gates], bits: int) -> tuple[np.ndarray, list[torch.Tensor]]:
    """U and ``S⁻¹ Vᵀ`` of the gates' leading singular values.

    Parameters
    ----------
    gates : one (K, p) a space
    bits : m, at most; fewer where the gates have a smaller rank

    Returns
    -------
    combination : (K, m) float32
    directions : list of Tensor (m, p) float32, one a space

    Raises
    ------
    NumericalError      all gates are 0, or not finite
    """
    from scipy.linalg import eigh

    n_subsets = len(gates[0])
    gram = np.zeros((n_subsets, n_subsets))
    for gate in gates:
        rows = gate_rows(gate, slice(None))
        for start in range(0, rows.shape[1], _COLUMNS_AT_ONCE):
            part = rows[:, start : start + _COLUMNS_AT_ONCE]
            gram += part @ part.T
    if not np.isfinite(gram).all() or not gram.any():
        raise NumericalError(
            "the gates have no principal directions: they are 0, or not finite",
            fix="run with --dtype fp32, or leave --sketch out",
        )
    count = min(bits, n_subsets)
    squares, vectors = eigh(gram, subset_by_index=(n_subsets - count, n_subsets - 1))
    squares, vectors = squares[::-1], vectors[:, ::-1]
    # a direction's sign is free: the largest entry is made positive, whatever the library
    largest = vectors[np.abs(vectors).argmax(axis=0), np.arange(count)]
    vectors = vectors * np.sign(largest)
    kept = squares > _SMALLEST * squares[0]
    squares, vectors = squares[kept], vectors[:, kept]
    weights = np.ascontiguousarray((vectors / squares).T, dtype=np.float32)
    directions = [torch.from_numpy(weights @ gate_rows(gate, slice(None))) for gate in gates]
    return np.ascontiguousarray(vectors, dtype=np.float32), directions


def encode(coordinates: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes (t, ⌈m / 8⌉) uint8 and steps (t,) float32 of coordinates z (t, m)."""
    return np.packbits(coordinates > 0, axis=1), np.abs(coordinates).mean(axis=1).astype(np.float32)


def fit_sketches(
    model: CausalLM,
    spaces: Sequence[OperatorSpace],
    layer: int,
    gates: Sequence[Gates],
    chunks: ChunkReader,
    bits: int,
    *,
    batch_tokens: int | None = None,
    scratch: Path | None = None,
    save_seconds: float = 60.0,
) -> Sketches:
    """Sketch every chunk: one more pass over the corpus, forward and backward.

    Parameters
    ----------
    gates : one (K, p) a space      means of chunks' gate gradients, in any unit
    bits : m; at most K are made
    scratch : directory, optional   where an interrupted pass continues from
    save_seconds : float            how often the pass is saved there

    Raises
    ------
    NumericalError      a loss or a gate is not finite
    """
    combination, directions = principal_directions(gates, bits)
    if len(directions[0]) < bits:
        note(f"{len(directions[0]):,} bits a chunk: more have no direction in {len(gates[0]):,} subsets")
    count = len(directions[0])
    codes = np.zeros((chunks.n_chunks, -(-count // 8)), np.uint8)
    step = np.zeros(chunks.n_chunks, np.float32)
    first = 0
    saved = scratch / "sketches.pt" if scratch is not None else None
    if saved is not None and saved.exists():
        state = torch.load(saved, weights_only=True, mmap=False)
        first, codes, step = state["next"], state["codes"].numpy(), state["step"].numpy()
    last_saved = time.monotonic()
    with progress("sketching chunks", chunks.n_chunks, unit="chunks") as bar:
        bar.advance(first)
        for start in range(first, chunks.n_chunks, _CHUNKS_AT_ONCE):
            rows = np.arange(start, min(start + _CHUNKS_AT_ONCE, chunks.n_chunks))
            products = gradient_products(
                model, spaces, layer, directions, chunks, rows, batch_tokens=batch_tokens
            )
            codes[rows], step[rows] = encode(products.sum(axis=0).T)
            bar.advance(len(rows))
            if saved is not None and time.monotonic() - last_saved > save_seconds:
                state = {"next": int(rows[-1]) + 1}
                state |= {"codes": torch.from_numpy(codes), "step": torch.from_numpy(step)}
                save_atomically(state, saved)
                last_saved = time.monotonic()
    return Sketches(codes, step, combination)
