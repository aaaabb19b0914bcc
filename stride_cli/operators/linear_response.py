"""First-order measurement: y = A g_x from one backward pass, whatever K is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stride_cli.data.batches import Batch
from stride_cli.operators.budget import tokens_at_once
from stride_cli.operators.gates import gate_responses
from stride_cli.operators.gradients import gate_gradients
from stride_cli.operators.store import Operators

if TYPE_CHECKING:
    from stride_cli.models.protocol import AttributableModel


def measure_linear(model: AttributableModel, operators: Operators, batch: Batch) -> np.ndarray:
    """Loss change that steering towards each subset causes, to first order in the gates.

        y[q, k] = a_k · g_q,      g_q = −∂loss(q)/∂a |_{a=0}

    For operators fitted in closed form this *is* the response that the fit defines; for gates that are not
    small it is the linear part of what `measure_exact` returns.

    Parameters
    ----------
    model : AttributableModel
    operators : Operators      K subsets
    batch : Batch              Q queries

    Returns
    -------
    ndarray (Q, K) float64     mean nats per scored token; positive where subset k lowers the loss on q
    """
    return measure_linear_with_loss(model, operators, batch)[0]


def measure_linear_with_loss(
    model: AttributableModel, operators: Operators, batch: Batch
) -> tuple[np.ndarray, np.ndarray]:
    """`measure_linear`, and the base model's loss on each query, (Q,) float64 nats per scored token."""
    spaces = [space.to(model.device) for space in operators.spaces]
    tokens = tokens_at_once(model, spaces, operators.layer)
    rows = max(1, tokens // batch.ids.shape[1])
    gradients: list[list[np.ndarray]] = [[] for _ in spaces]
    losses: list[np.ndarray] = []
    for start in range(0, len(batch.ids), rows):
        part = batch.take(slice(start, start + rows))
        found, _, loss = gate_gradients(model, spaces, operators.layer, part)
        for kept, gradient in zip(gradients, found, strict=True):
            kept.append(gradient.cpu().numpy())
        losses.append(loss.cpu().numpy())
    responses = np.zeros((len(batch.ids), operators.n_subsets))
    for gates, kept in zip(operators.gates, gradients, strict=True):
        responses += gate_responses(gates, np.concatenate(kept))
    return responses, np.concatenate(losses)
