"""First-order measurement: y = A g_x from one backward pass, whatever K is."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch

from stride_cli.data.batches import Batch, RememberingBatch
from stride_cli.operators.device_memory import ShrinkingBatches
from stride_cli.operators.gates import gate_responses
from stride_cli.operators.gradients import gate_gradients
from stride_cli.operators.steered_model import SteeredModel


def measure_linear(steered: SteeredModel, batch: Batch) -> np.ndarray:
    """Measure the loss change that steering towards each subset causes, to first order in the gates.

        y[q, k] = a_k · g_q,      g_q = −∂loss(q)/∂a |_{a=0}

    For operators fitted in closed form this *is* the response that the fit defines; for gates that are not
    small it is the linear part of what `measure_exact` returns.

    Parameters
    ----------
    steered : SteeredModel     with operators of K subsets
    batch : Batch              Q queries

    Returns
    -------
    ndarray (Q, K) float64     mean nats per scored token; positive where subset k lowers the loss on q
    """
    return measure_linear_with_loss(steered, batch)[0]


def measure_linear_with_loss(steered: SteeredModel, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """Measure as `measure_linear`, with the base model's loss on each query, (Q,) float64 nats per token."""
    gradients, losses = gradients_with_loss(steered, batch)
    losses = batch.losses_of_queries(losses)
    responses = np.zeros((len(losses), steered.operators.n_subsets))
    for gates, gradient in zip(steered.operators.gates, gradients, strict=True):
        responses += gate_responses(gates, gradient.numpy())
    return responses, losses


def gradients_with_loss(steered: SteeredModel, batch: Batch) -> tuple[list[torch.Tensor], np.ndarray]:
    """Take gate gradients of queries, one (Q, p) float32 on the CPU a space, and losses of the batch's rows,
    (B,) float64.

    As many queries at once as memory allows; of a `RememberingBatch` once for each operators.
    """
    if isinstance(batch, RememberingBatch):
        found: tuple[list[torch.Tensor], np.ndarray] = batch.remembered(
            steered.operators, lambda: _gradients_with_loss(steered, batch)
        )
        return found
    return _gradients_with_loss(steered, batch)


def each_remembering(whole: RememberingBatch, batches: Sequence[Batch]) -> list[RememberingBatch]:
    """Split a batch into batches of one row, which remember what it does.

    Parameters
    ----------
    whole : RememberingBatch      Q rows
    batches : Q, of one row each, without the others' padding
    """
    found = [RememberingBatch.of(batch) for batch in batches]
    for row, own in enumerate(found):
        for key, (of, (gradients, losses)) in whole.passes.items():
            some = slice(row, row + 1)
            own.passes[key] = of, ([gradient[some] for gradient in gradients], losses[some])
    return found


def _gradients_with_loss(steered: SteeredModel, batch: Batch) -> tuple[list[torch.Tensor], np.ndarray]:
    rows = max(1, steered.tokens_at_once // batch.ids.shape[1])
    n_queries = len(batch.ids) if batch.parts is None else len(batch.parts)
    gradients = [torch.zeros(n_queries, space.gate_size) for space in steered.spaces]
    losses: list[np.ndarray] = []
    parts = (batch.take(slice(start, start + rows)) for start in range(0, len(batch.ids), rows))
    done = 0
    for _, (found, loss) in ShrinkingBatches().each(parts, partial(gate_gradients, steered)):
        some = slice(done, done + len(loss))
        for whole, gradient in zip(gradients, found, strict=True):
            if batch.parts is None:
                whole[some] = gradient
            else:  # of many prompts that are one query only the sum is kept
                whole += (torch.from_numpy(batch.parts[:, some]).to(gradient) @ gradient).cpu()
        done += len(loss)
        losses.append(loss.cpu().numpy())
    return gradients, np.concatenate(losses)
