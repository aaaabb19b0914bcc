"""First-order measurement: y = A g_x from one backward pass, whatever K is."""

from __future__ import annotations

import numpy as np

from stride_cli.data.batches import Batch
from stride_cli.operators.gates import gate_responses
from stride_cli.operators.gradients import gate_gradients
from stride_cli.operators.steered_model import SteeredModel


def measure_linear(steered: SteeredModel, batch: Batch) -> np.ndarray:
    """Loss change that steering towards each subset causes, to first order in the gates.

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
    """`measure_linear`, and the base model's loss on each query, (Q,) float64 nats per scored token."""
    operators = steered.operators
    rows = max(1, steered.tokens_at_once // batch.ids.shape[1])
    gradients: list[list[np.ndarray]] = [[] for _ in steered.spaces]
    losses: list[np.ndarray] = []
    for start in range(0, len(batch.ids), rows):
        part = batch.take(slice(start, start + rows))
        found, _, loss = gate_gradients(steered, part)
        for kept, gradient in zip(gradients, found, strict=True):
            kept.append(gradient.cpu().numpy())
        losses.append(loss.cpu().numpy())
    responses = np.zeros((len(batch.ids), operators.n_subsets))
    for gates, kept in zip(operators.gates, gradients, strict=True):
        responses += gate_responses(gates, np.concatenate(kept))
    return responses, np.concatenate(losses)
