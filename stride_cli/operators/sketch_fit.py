"""Making the sketches of a corpus: directions from a sample of its chunks, then one pass over all of them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from stride_cli.corpus.gate_budget import FOLDED
from stride_cli.operators.gates import PackedGates, gate_rows
from stride_cli.operators.gradients import gate_gradients
from stride_cli.operators.saving import save_atomically
from stride_cli.operators.sketches import Folding, Sketches, encode
from stride_cli.output import note, progress
from stride_cli.randomness import stream, torch_seed

if TYPE_CHECKING:
    from stride_cli.data.batches import ChunkReader
    from stride_cli.operators.steered_model import SteeredModel

_SAMPLE = 8192  # chunks that the directions are found from


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
    folding = Folding([space.gate_size for space in steered.spaces], seed)

    def folded(group: np.ndarray) -> torch.Tensor:
        # h(share_i g_i), (B, 8192): chunks' gradients as the fit weighs them
        parts = []
        for batch in map(chunks.batch, chunks.small_groups(group)):
            parts.append(folding(gate_gradients(steered, batch)[0]) * chunks.share(batch))
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
