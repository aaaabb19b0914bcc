"""One query measured by several checkpoints, each with operators of its own, that share a design."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from stride_cli.measurement.additive import additive_measurement

if TYPE_CHECKING:
    from stride_cli.models.adapter import CausalLM
    from stride_cli.operators.batches import Batch
    from stride_cli.operators.store import Operators


def combine_checkpoints(responses: Sequence[np.ndarray], row_sizes: np.ndarray | None) -> np.ndarray:
    """Responses of several checkpoints as those of one, in nats of the first.

        y = (1/C) Σ_c y_c · s_0 / s_c

    y_c is what the recovery explains of checkpoint c (see `additive_measurement`), s_c its standard deviation
    over the subsets: losses of early and late checkpoints differ in scale, and each has one voice. Since
    y_c is linear in the responses, they are what is combined, and `additive_measurement` of the result is y.

    Parameters
    ----------
    responses : C arrays (..., K) float64      the first are the index's own model's
    row_sizes : (K,), optional                 |A_k|; None where the recovery explains responses as they are

    Returns
    -------
    ndarray (..., K) float64
        The only array itself where there is one. A checkpoint whose responses do not vary adds nothing; where
        the first one's do not, the others have no scale to be put on, and the result is 0.
    """
    first, *others = responses
    if not others:
        return first
    total = np.zeros_like(first, dtype=np.float64)
    with np.errstate(invalid="ignore"):  # a response that is not finite stays so, and is refused as such
        reference = _spread(first, row_sizes)
        for found in responses:
            spread = _spread(found, row_sizes)
            total += found * np.divide(reference, spread, out=np.zeros_like(spread), where=spread > 0)
    return total / len(responses)


def _spread(responses: np.ndarray, row_sizes: np.ndarray | None) -> np.ndarray:
    """s_c, (..., 1) float64."""
    y = responses if row_sizes is None else additive_measurement(responses, row_sizes)
    spread: np.ndarray = np.std(y, axis=-1, keepdims=True, dtype=np.float64)
    return spread


def measure_checkpoints(
    pairs: Sequence[tuple[CausalLM, Operators]],
    batch: Batch,
    *,
    method: str,
    row_sizes: np.ndarray | None,
    batch_size: int = 8,
    check: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray, float | None]:
    """Measure queries with every checkpoint, and combine what the subsets answer.

    Parameters
    ----------
    pairs : models with their operators; the index's own first
    batch : Batch                    Q queries
    method : "linear" or "exact"
    row_sizes : see `combine_checkpoints`
    batch_size : int                 steered continuations at once (exact)
    check : (S,) int64, optional     subsets on which a linear measurement is compared with the exact one

    Returns
    -------
    responses : (Q, K) float64       nats per scored token of the first model
    losses : (Q,) float64            of the first model
    agreement : float or None        Pearson correlation of linear and exact responses of the first query, of
                                     the checkpoint where it is lowest; None where only one was measured

    Raises
    ------
    QueryError      a query is longer than a checkpoint's context
    """
    from stride_cli.measurement.exact import measure_exact, pearson
    from stride_cli.measurement.linear import measure_linear_with_loss

    found, losses, agreements = [], [], []
    for model, operators in pairs:
        responses, loss = measure_linear_with_loss(model, operators, batch)
        if method == "exact":
            exact = measure_exact(model, operators, batch, batch_size=batch_size)
            agreements.append(pearson(exact[0], responses[0]))
            responses = exact
        elif check is not None:
            exact = measure_exact(model, operators, batch, subsets=check, batch_size=batch_size)
            agreements.append(pearson(exact[0], responses[0, check]))
        found.append(responses)
        losses.append(loss)
    return combine_checkpoints(found, row_sizes), losses[0], min(agreements, default=None)
