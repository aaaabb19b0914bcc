"""Losses of steered continuations: of both ways along one direction here; of K subsets in the paper's way.

The paper measures by K steered continuations a query (`stride_cli.research.paper.exact_response`). A fit in
closed form answers from one gradient; what each token of a chunk has to do with it, two continuations tell.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from importlib import import_module
from typing import Any

import numpy as np
import torch

from stride_cli.data.batches import Batch
from stride_cli.operators.steered_model import SteeredModel

_FEW_CLASSES = 1024
_HEAD_NUMBERS = 1 << 22  # logits of steered rows held at once


def paper_measurement() -> Any:
    """Import the paper's measurement by name: rooms do not import research."""
    return import_module("stride_cli.research.paper.exact_response")


def pearson(a: np.ndarray, b: np.ndarray) -> float:
    """Compute the Pearson correlation; 0 where either side does not vary."""
    a, b = a - a.mean(), b - b.mean()
    scale = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b) / scale if scale > 0 and np.isfinite(scale) else 0.0


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Compute the nats of targets (S,) under logits (B, S, V): (B, S) float32, of few classes float64."""
    if logits.shape[-1] <= _FEW_CLASSES:
        # a sure classifier's loss is far below 1, and float32 would round its change away
        logits = logits.double()
    count = len(logits)
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.repeat(count), reduction="none"
    ).reshape(count, -1)


def token_losses_both_ways(
    steered: SteeredModel, batch: Batch, gates: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Measure losses of several sequences in one pass, steered towards the gates and away from them.

    A space acts on every position by itself, so that the rows of a batch may lie behind one another for it:
    its gates are multiplied with all of them at once. The head runs at scored positions only, as many at a
    time as stay in the cache.

    Parameters
    ----------
    batch : Batch               B sequences
    gates : (p,) a space

    Returns
    -------
    losses : (2, S) float64     nats of the scored tokens of all rows, row by row
    places : (S,) int64         where each of them stands among the B T of the batch
    """
    # 1. The scored positions of all rows, and where the continuation begins
    model, spaces, layer = steered.model, steered.spaces, steered.layer
    ways, layers = 2, steered.layer_space
    gates = [torch.stack([gate, -gate]) for gate in gates]
    ids = batch.ids.to(model.device)
    count, length = ids.shape
    scored = torch.nonzero(batch.weights[:, 1:].to(model.device))  # (S, 2): row, and position that predicts
    at = scored[:, 0] * length + scored[:, 1]
    targets, tokens = ids.flatten()[at + 1], ids.flatten()[None, at]
    begin, inputs = steered.entry_states(ids)
    read_inputs = None if inputs is None else inputs.flatten(0, 1)[None, at]  # (1, S, d)
    pairs = list(zip(spaces, gates, strict=True))
    residual = [(space, gate) for space, gate in pairs if space.site == "residual"]

    def by_way(states: torch.Tensor) -> torch.Tensor:
        return states.reshape(ways, count * length, states.shape[-1])

    def steer(number: int, read: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        assert layers is not None
        shift = layers(by_way(read), inside[0], number)
        return output + shift.reshape(output.shape).to(output.dtype)

    # 2. Through the blocks, both ways as one batch (2 B, T, d); blocks that are not steered say the same
    inside = [gate for space, gate in pairs if space.site == "layers"]
    state = begin.repeat(ways, 1, 1) if inside or residual else begin
    with model.at_layers(layers.which, length, steer) if layers else nullcontext():
        if (start := steered.first_block) < layer:
            state = model.advance(state, start, layer)
        shift = sum(space(by_way(state), gate) for space, gate in residual)
        if not isinstance(shift, int):
            state = state + shift.reshape(state.shape).to(state.dtype)
        final = model.continue_from(state, layer)
    final = final.reshape(-1, count * length, final.shape[-1])[:, at]  # (2 or 1, S, d) before the head
    # 3. Through the head, a few positions at a time
    block = max(1, _HEAD_NUMBERS // (ways * model.vocab_size))
    losses = []
    for first in range(0, len(at), block):
        some = slice(first, first + block)
        logits = model.uncapped_logits(final[:, some]).float().expand(ways, -1, -1)  # (2, s, V)
        given = None if read_inputs is None else read_inputs[:, some]
        for space, gate in pairs:
            if space.site != "logit":
                continue
            read = space.reads(final[:, some], given, tokens[:, some])
            shift = space(read, gate[: len(read)])
            # what reads the same both ways shifts as far the other way
            logits = logits + (shift if len(read) == ways else torch.cat([shift, -shift]))
        # in float64: the change of a memorised token's loss would be lost to rounding
        losses.append(cross_entropy(model.soft_cap(logits).double(), targets[some]))
    return torch.cat(losses, dim=1) if losses else final.new_zeros(ways, 0, dtype=torch.float64), at + 1
