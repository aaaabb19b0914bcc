"""The unsteered model where steering begins: states, losses and highest logits of chunks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from stride_cli.data.batches import Batch, ChunkReader
from stride_cli.operators.steered_model import SteeredModel
from stride_cli.research.paper.losses import fidelity_loss


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

    Attributes
    ----------
    losses : (n,) float32      mean nats per scored token; NaN where not computed yet
    """

    def __init__(self, steered: SteeredModel, chunks: ChunkReader, *, top: int) -> None:
        self._steered, self._model = steered, steered.model
        self._top = min(top, self._model.vocab_size)
        self.losses = np.full(chunks.n_chunks, np.nan, dtype=np.float32)

    def enter(self, batch: Batch) -> Entered:
        """Run chunks to where steering begins."""
        ids = batch.ids.to(self._model.device)
        hidden, inputs = self._steered.entry_states(ids)
        inputs = None if inputs is None else inputs[:, :-1]
        return Entered(hidden, inputs, ids[:, :-1], ids[:, 1:], batch.weights[:, 1:].to(self._model.device))

    def losses_of(self, batch: Batch, entered: Entered) -> np.ndarray:
        """Compute the loss (B,) float64 of each chunk without steering."""
        unknown = np.isnan(self.losses[batch.rows])
        if unknown.any():
            few = entered.rows(torch.from_numpy(unknown))
            self.losses[batch.rows[unknown]] = self._losses_of(few, self._final(few))
        return self.losses[batch.rows].astype(np.float64)

    @torch.no_grad()
    def highest(self, entered: Entered) -> tuple[torch.Tensor, torch.Tensor]:
        """Find the highest logits at each position, float32, and their tokens: (B, T − 1, m) each."""
        values, tokens = self._model.logits(self._final(entered)).float().topk(self._top, dim=-1)
        return values, tokens

    @torch.no_grad()
    def _final(self, entered: Entered) -> torch.Tensor:
        """Compute the input of the output head without steering, (B, T − 1, d)."""
        return self._model.continue_from(entered.hidden, self._steered.layer)[:, :-1]

    @torch.no_grad()
    def _losses_of(self, entered: Entered, final: torch.Tensor) -> np.ndarray:
        found = fidelity_loss(self._model.token_losses(final, entered.targets), entered.weights)
        losses: np.ndarray = found.cpu().numpy()
        return losses
