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

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from stride_cli.corpus.gate_budget import FOLDED
from stride_cli.operators.gates import PackedGates, gate_responses, gate_rows
from stride_cli.operators.gradients import gate_gradients
from stride_cli.operators.saving import save_atomically
from stride_cli.output import note, progress
from stride_cli.randomness import stream, torch_seed

if TYPE_CHECKING:
    from stride_cli.data.batches import ChunkReader
    from stride_cli.operators.steered_model import SteeredModel

_SAMPLE = 8192  # chunks that the directions are found from
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


def principal_directions(rows: torch.Tensor, count: int, seed: int) -> np.ndarray:
    """The leading right singular vectors of (N, h) rows, by a randomised SVD: (min(count, N, h), h)."""
    count = min(count, *rows.shape)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(torch_seed(seed, "sketch directions"))
        found = torch.svd_lowrank(rows, q=min(count + 32, *rows.shape), niter=4)[2][:, :count].T
    # a direction's sign is free: its largest entry is made positive
    largest = found.gather(1, found.abs().argmax(dim=1, keepdim=True))
    directions: np.ndarray = (found * largest.sign()).contiguous().numpy()
    return directions


def fit_sketches(
    steered: SteeredModel,
    chunks: ChunkReader,
    bits: int,
    *,
    seed: int,
    batch_tokens: int,
    scratch: Path | None = None,
    save_seconds: float = 60.0,
) -> Sketches:
    """Sketch every chunk: a pass over up to 8,192 chunks, and where there are more, one over all of them.

    Parameters
    ----------
    bits : m; no more are made than there are chunks
    seed : int                      names the folding, the sample and the randomised SVD
    batch_tokens : int              padded tokens at once
    scratch : directory, optional   where an interrupted pass continues from
    save_seconds : float            how often the pass is saved there

    Raises
    ------
    NumericalError      a loss is not finite
    """
    # h, and chunks' gradients as the fit weighs them: share_i = scored tokens over the corpus's mean
    folding = Folding([space.gate_size for space in steered.spaces], seed)
    typical = max(1.0, chunks.scored_tokens() / chunks.n_chunks)

    def folded(group: np.ndarray) -> torch.Tensor:
        parts = []
        for batch in map(chunks.batch, chunks.small_groups(group)):
            gradients = gate_gradients(steered.model, steered.spaces, steered.layer, batch)[0]
            parts.append(folding(gradients) * (batch.scored / typical)[:, None])
        return torch.cat(parts)

    saved = scratch / "sketches.pt" if scratch is not None else None
    if saved is not None and saved.exists():
        state = torch.load(saved, weights_only=True, mmap=False)
        first, codes, step = state["next"], state["codes"].numpy(), state["step"].numpy()
        directions = PackedGates(state["directions"].numpy(), state["scale"].numpy())
        rows = torch.zeros(0, FOLDED)
    else:
        # first pass: V, the leading right singular vectors of a sample's h(share_i g_i), (N, 8192)
        sample = np.sort(stream(seed, "sketch sample").permutation(chunks.n_chunks)[:_SAMPLE])
        place = np.full(chunks.n_chunks, -1)
        place[sample] = np.arange(len(sample))
        rows = torch.zeros(len(sample), FOLDED)
        with progress("finding directions", len(sample), unit="chunks") as bar:
            for group in chunks.plan(batch_tokens, sample):
                rows[torch.from_numpy(place[group])] = folded(group)
                bar.advance(len(group))
        if bits > len(sample):
            note(f"{len(sample):,} bits a chunk: no more than there are chunks")
        directions = PackedGates.of(principal_directions(rows, bits, seed))
        codes = np.zeros((chunks.n_chunks, -(-len(directions) // 8)), np.uint8)
        step = np.zeros(chunks.n_chunks, np.float32)
        first = 0
    # second pass: z_i = V h(share_i g_i), (B, m), of every chunk, of which signs and mean size are kept
    along = torch.from_numpy(gate_rows(directions, slice(None))).T
    known = len(rows) == chunks.n_chunks  # the sample was all of them
    plan = chunks.plan(batch_tokens)
    last_saved = time.monotonic()
    with progress("sketching chunks", chunks.n_chunks, unit="chunks") as bar:
        bar.advance(sum(len(group) for group in plan[:first]))
        for number in range(first, len(plan)):
            group = plan[number]
            found = rows[torch.from_numpy(group)] if known else folded(group)
            codes[group], step[group] = encode((found @ along).numpy())
            bar.advance(len(group))
            if saved is not None and time.monotonic() - last_saved > save_seconds:
                kept = {"codes": codes, "step": step}
                kept |= {"directions": directions.values, "scale": directions.scale}
                state = {name: torch.from_numpy(values) for name, values in kept.items()}
                save_atomically({"next": number + 1, **state}, saved)
                last_saved = time.monotonic()
    return Sketches(codes, step, directions, seed)
