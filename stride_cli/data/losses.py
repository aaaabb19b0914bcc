"""Losses of rows of a batch, by a forward pass."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from stride_cli.data.batches import Batch


def row_losses(model: Any, batch: Batch) -> torch.Tensor:
    """Summed loss of each row's scored tokens, (B,) in float64 from float32 logits; differentiable.

    Parameters
    ----------
    model : AttributableModel, or a classifier with its interface
    """
    import torch
    import torch.nn.functional as F

    ids, weights = batch.ids.to(model.device), batch.weights.to(model.device)
    final = model.continue_from(model.hidden(ids, 0), 0)  # (B, T, d)
    row, position = torch.nonzero(weights[:, 1:], as_tuple=True)  # token position + 1 is predicted here
    logits = model.logits(final[row, position]).float()
    losses = F.cross_entropy(logits, ids[row, position + 1], reduction="none").double()
    losses = losses * weights[row, position + 1]
    return torch.zeros(len(ids), dtype=torch.float64, device=losses.device).index_add(0, row, losses)
