"""Add up chunks' gate gradients over subsets, and project each: one process, over all chunks or a range."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from stride_cli.data.batches import ChunkReader
from stride_cli.operators.device_memory import ShrinkingBatches
from stride_cli.operators.gradients import chunk_gradients
from stride_cli.operators.projections import Projector
from stride_cli.operators.saving import SavedState
from stride_cli.operators.steered_model import SteeredModel
from stride_cli.operators.subset_sums import subset_sums
from stride_cli.output import progress


@dataclass(frozen=True)
class PassSettings:
    """Settings of a pass over the corpus.

    Attributes
    ----------
    batch_tokens : padded tokens in one forward pass
    project : bytes that are kept of every chunk's own gradient; 0: none
    seed : of the projections' folding
    """

    batch_tokens: int
    project: int = 0
    seed: int = 0


@dataclass(frozen=True)
class CorpusSums:
    """Sums of a pass over chunks.

    Attributes
    ----------
    sums : of each space (K, p) float32        M G, on the CPU; empty where no subsets are given
    loss : Σ over chunks of mean nats per scored token
    scored : chunks that have a scored token
    """

    sums: list[torch.Tensor]
    loss: float
    scored: int

    @property
    def mean_loss(self) -> float:
        """Nats per scored token of the mean chunk."""
        return self.loss / max(1, self.scored)


def plan_from(chunks: ChunkReader, batch_tokens: int, first: int) -> list[np.ndarray]:
    """Groups of the chunks from `first` on, as one pass goes over them."""
    return chunks.plan(batch_tokens, np.arange(first, chunks.n_chunks) if first else None)


def accumulate(
    steered: SteeredModel,
    chunks: ChunkReader,
    plan: Sequence[np.ndarray],
    columns: np.ndarray | None,
    n_subsets: int,
    projector: Projector | None = None,
    saved: SavedState | None = None,
) -> CorpusSums:
    """Add up gradients of groups of chunks, and hand each to the projector.

    Parameters
    ----------
    plan : groups of chunks, as of `ChunkReader.plan`
    saved : SavedState, optional      goes on from what an interrupted pass has left
    """
    saved, steered = saved or SavedState(None, 0.0), replace(steered, fitting=True)
    # 1. Where sums are kept: a device that has no room for all K subsets goes over the corpus in turns
    together = steered.chunks_at_once
    sizes = [space.gate_size for space in steered.spaces] if columns is not None else []
    # gradients, and what is made of them on the way
    beside = 16 * together * steered.gate_size
    sums = subset_sums(n_subsets, sizes, steered.model.device, beside=beside)
    # 2. What an interrupted pass has left. One of other turns, of a device that had more room or less, is
    # begun again
    first, loss_sum, loss_count = 0, 0.0, 0
    if (state := saved.load()) is not None and state.get("turns", 1) == sums.turns:
        first, loss_sum, loss_count = state["next"], state["loss_sum"], state["loss_count"]
        sums.resume(state["sums"], state.get("turn", 0))
        if projector is not None:
            projector.resume(state["projector"])
    # 3. The pass, group by group of the plan
    shrinking = ShrinkingBatches()
    total = sum(int(chunks.lengths[group].sum()) for group in plan)
    doing = "projecting chunks" if columns is None else "fitting operators"
    with progress(doing, sums.turns * total, unit="tokens") as bar:
        bar.advance(sum(int(chunks.lengths[plan[step % len(plan)]].sum()) for step in range(first)))
        for step in range(first, sums.turns * len(plan)):
            if step and step % len(plan) == 0:
                sums.next_turn()
            group = plan[step % len(plan)]
            parts = map(chunks.batch, chunks.small_groups(group, together))
            for batch, (gradients, loss) in shrinking.each(parts, partial(chunk_gradients, steered)):
                if columns is not None:
                    sums.add(columns[batch.rows], gradients, chunks.share(batch))
                if sums.turn:  # all else is known since the first
                    continue
                if projector is not None:
                    projector.add(batch, gradients)
                loss_sum += float(loss.sum())
                loss_count += int((batch.scored > 0).sum())
            bar.advance(int(chunks.lengths[group].sum()))
            if saved.due:
                state = {"next": step + 1, "loss_sum": loss_sum, "loss_count": loss_count}
                state |= {"sums": sums.sums(), "turn": sums.turn, "turns": sums.turns}
                if projector is not None:
                    state["projector"] = projector.state()
                saved.save(state)
    return CorpusSums(sums.sums(), loss_sum, loss_count)
