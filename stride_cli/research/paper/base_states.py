"""The unsteered model where steering begins: states, losses and highest logits of chunks, computed once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from stride_cli.data.batches import Batch, ChunkReader
from stride_cli.operators.spaces import reads_input
from stride_cli.operators.steered_model import SteeredModel
from stride_cli.research.paper.losses import fidelity_loss

_KEPT_BYTES = 512 << 20  # of states and highest logits; a larger corpus's are made anew at every visit
_BATCH_TOKENS = 4096


@dataclass(frozen=True)
class Entered:
    """A batch where steering begins, without gradients: `hidden` (B, T, d) after the first blocks, `inputs`
    (B, T − 1, d) of the first block where a space reads them; `tokens` that predictions are made from,
    `targets` and `weights` (B, T − 1)."""

    hidden: torch.Tensor
    inputs: torch.Tensor | None
    tokens: torch.Tensor
    targets: torch.Tensor
    weights: torch.Tensor

    def rows(self, chosen: torch.Tensor) -> Entered:
        """Take some of its rows, by number or mask."""
        chosen = chosen.to(self.hidden.device)
        inputs = None if self.inputs is None else self.inputs[chosen]
        rest = (self.tokens[chosen], self.targets[chosen], self.weights[chosen])
        return Entered(self.hidden[chosen], inputs, *rest)

    def repeated(self, count: int) -> Entered:
        """Repeat its one row `count` times."""
        return self.rows(torch.zeros(count, dtype=torch.int64))


class BaseStates:
    """States, losses and highest logits of the frozen model on chunks, before it is steered.

    Parameters
    ----------
    steered : SteeredModel      whose layer and spaces say where steering begins
    chunks : ChunkReader
    top : int           how many of the highest logits at each position are wanted (0: none)
    visits : int        how many chunks will be asked for, repetitions counted: with two a chunk or more, and
                        512 MB of memory to hold them, everything is computed in one pass at the beginning

    Attributes
    ----------
    losses : (n,) float32      mean nats per scored token; NaN where not computed yet
    kept : bool                whether that pass was made
    """

    def __init__(self, steered: SteeredModel, chunks: ChunkReader, *, top: int, visits: int) -> None:
        self._steered, self._model = steered, steered.model
        self._top = min(top, self._model.vocab_size)
        self.losses = np.full(chunks.n_chunks, np.nan, dtype=np.float32)
        probe = self._compute(chunks.batch(np.arange(1))).hidden
        tokens = int(chunks.lengths.sum())
        each = probe.shape[-1] * probe.element_size() + self._top * (4 + 8)
        self.kept = (
            visits >= 2 * chunks.n_chunks and tokens * each <= _KEPT_BYTES and not reads_input(steered.spaces)
        )
        if not self.kept:
            return
        self._starts = np.concatenate([[0], np.cumsum(chunks.lengths)])
        self._hidden = probe.new_zeros(tokens, probe.shape[-1])
        self._values = torch.zeros(tokens, self._top, device=self._model.device)
        self._tokens = torch.zeros(tokens, self._top, dtype=torch.int64, device=self._model.device)
        for batch in chunks.batches(_BATCH_TOKENS):
            entered = self._compute(batch)
            final = self._final(entered)
            self.losses[batch.rows] = self._losses_of(entered, final)
            values, best = self._highest_of(final) if self._top else (None, None)
            for position, row in enumerate(batch.rows.tolist()):
                here, stop = int(self._starts[row]), int(self._starts[row + 1])
                self._hidden[here:stop] = entered.hidden[position, : stop - here]
                if values is not None and best is not None:
                    self._values[here : stop - 1] = values[position, : stop - here - 1]
                    self._tokens[here : stop - 1] = best[position, : stop - here - 1]

    def enter(self, batch: Batch) -> Entered:
        """Run chunks to where steering begins."""
        if not self.kept:
            return self._compute(batch)
        ids = batch.ids.to(self._model.device)
        hidden = self._padded(self._hidden, batch, ids.shape[1])
        return Entered(hidden, None, ids[:, :-1], ids[:, 1:], batch.weights[:, 1:].to(self._model.device))

    def losses_of(self, batch: Batch, entered: Entered) -> np.ndarray:
        """Compute the loss (B,) float64 of each chunk without steering."""
        unknown = np.isnan(self.losses[batch.rows])
        if unknown.any():
            few = entered.rows(torch.from_numpy(unknown))
            self.losses[batch.rows[unknown]] = self._losses_of(few, self._final(few))
        return self.losses[batch.rows].astype(np.float64)

    def highest(self, batch: Batch, entered: Entered) -> tuple[torch.Tensor, torch.Tensor]:
        """Find the highest logits at each position, float32, and their tokens: (B, T − 1, m) each."""
        if not self.kept:
            return self._highest_of(self._final(entered))
        length = batch.ids.shape[1]
        values, tokens = (self._padded(table, batch, length) for table in (self._values, self._tokens))
        return values[:, :-1], tokens[:, :-1]

    def _padded(self, table: torch.Tensor, batch: Batch, length: int) -> torch.Tensor:
        """Take the rows' entries of a table (tokens, ·): (B, T, ·), zero behind a row's end."""
        found = table.new_zeros(len(batch.rows), length, table.shape[1])
        for position, row in enumerate(batch.rows.tolist()):
            here, stop = int(self._starts[row]), int(self._starts[row + 1])
            found[position, : stop - here] = table[here:stop]
        return found

    def _compute(self, batch: Batch) -> Entered:
        ids = batch.ids.to(self._model.device)
        hidden, inputs = self._steered.entry_states(ids)
        inputs = None if inputs is None else inputs[:, :-1]
        return Entered(hidden, inputs, ids[:, :-1], ids[:, 1:], batch.weights[:, 1:].to(self._model.device))

    @torch.no_grad()
    def _final(self, entered: Entered) -> torch.Tensor:
        """Compute the input of the output head without steering, (B, T − 1, d)."""
        return self._model.continue_from(entered.hidden, self._steered.layer)[:, :-1]

    @torch.no_grad()
    def _losses_of(self, entered: Entered, final: torch.Tensor) -> np.ndarray:
        found = fidelity_loss(self._model.token_losses(final, entered.targets), entered.weights)
        losses: np.ndarray = found.cpu().numpy()
        return losses

    @torch.no_grad()
    def _highest_of(self, final: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, tokens = self._model.logits(final).float().topk(self._top, dim=-1)
        return values, tokens
