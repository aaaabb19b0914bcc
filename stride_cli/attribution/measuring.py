"""One query measured by several checkpoints, each with operators of its own, of subsets of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from stride_cli.attribution.additive import additive_measurement

if TYPE_CHECKING:
    from stride_cli.data.batches import Batch
    from stride_cli.operators.steered_model import SteeredModel


def stack_checkpoints(responses: Sequence[np.ndarray], row_sizes: np.ndarray | None) -> np.ndarray:
    """Responses of several checkpoints one after the other, in nats of the first.

        y = [y_0, y_1 · s_0 / s_1, …]

    y_c is what the recovery explains of checkpoint c (see `additive_measurement`), s_c its standard deviation
    over the subsets: losses of early and late checkpoints differ in scale, and each has one voice. Since
    y_c is linear in the responses, they are what is scaled, and `additive_measurement` of the result is y.

    Parameters
    ----------
    responses : C arrays (..., K) float64      the first are the index's own model's
    row_sizes : (C, K), optional               |A_ck|; None where the recovery explains responses as they are

    Returns
    -------
    ndarray (..., C K) float64
        The only array itself where there is one. A checkpoint whose responses do not vary says nothing (0);
        where the first one's do not, the others have no scale to be put on, and all are 0.
    """
    first, *others = responses
    if not others:
        return first
    scaled = [first]
    with np.errstate(invalid="ignore"):  # a response that is not finite stays so, and is refused as such
        reference = _spread(first, None if row_sizes is None else row_sizes[0])
        for number, found in enumerate(others, 1):
            spread = _spread(found, None if row_sizes is None else row_sizes[number])
            scale = np.divide(reference, spread, out=np.zeros_like(spread), where=spread > 0)
            scaled.append(found * scale)
    return np.concatenate(scaled, axis=-1)


def _spread(responses: np.ndarray, row_sizes: np.ndarray | None) -> np.ndarray:
    """s_c, (..., 1) float64."""
    y = responses if row_sizes is None else additive_measurement(responses, row_sizes)
    spread: np.ndarray = np.std(y, axis=-1, keepdims=True, dtype=np.float64)
    return spread


def measure_batch(
    steered: SteeredModel,
    batch: Batch,
    *,
    method: str,
    batch_size: int = 8,
    check: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray, float | None]:
    """Measure queries with one model.

    Parameters
    ----------
    batch : Batch                    Q queries
    method : "linear" or "exact"
    batch_size : int                 steered continuations at once (exact)
    check : (S,) int64, optional     subsets on which a linear measurement is compared with the exact one

    Returns
    -------
    responses : (Q, K) float64       nats per scored token
    losses : (Q,) float64            mean nats per scored token
    agreement : float or None        Pearson correlation of linear and exact responses of the first query;
                                     None where only one was measured

    Raises
    ------
    QueryError      a query is longer than the model's context
    """
    from stride_cli.operators.exact_response import measure_exact, pearson
    from stride_cli.operators.linear_response import measure_linear_with_loss

    responses, losses = measure_linear_with_loss(steered, batch)
    if method == "exact":
        exact = measure_exact(steered, batch, batch_size=batch_size)
        return exact, losses, pearson(exact[0], responses[0])
    if check is None:
        return responses, losses, None
    exact = measure_exact(steered, batch, subsets=check, batch_size=batch_size)
    return responses, losses, pearson(exact[0], responses[0, check])
