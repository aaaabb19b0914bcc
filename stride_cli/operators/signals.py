"""What the loss of a batch says where operators act."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class Signals:
    """What the loss of a batch says at the two places where operators act.

    Attributes
    ----------
    hidden : (B, T, d)            residual stream at the layer
    final : (B, T, d)             normed state before the head
    pull : (B, T, d) float32 or None
        ``−∂loss/∂hidden``; None where no space acts on the residual stream.
    logit : list of (B, p) float32
        ``−∂loss/∂a`` of each logit space, in order.
    loss : (B,) float64           mean nats per scored token
    inputs : (B, T, d) or None    input of the first block, where a space reads it
    inner : list of (B, T, in)    what each of the linear layers reads at which a space acts
    given : list of (B, T, out)   ``−∂loss/∂`` what it gives
    prediction : (V,) float64 or None
        Sum over the scored positions of the model's distribution of the next token; where asked for.
    """

    hidden: torch.Tensor
    final: torch.Tensor
    pull: torch.Tensor | None
    logit: list[torch.Tensor]
    loss: torch.Tensor
    inputs: torch.Tensor | None = None
    inner: list[torch.Tensor] = field(default_factory=list)
    given: list[torch.Tensor] = field(default_factory=list)
    prediction: torch.Tensor | None = None
