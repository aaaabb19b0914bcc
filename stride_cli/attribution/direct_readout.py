"""Direct readout: the influence of single chunks in gate space, from their own gradients.

What `measure_linear` says of a subset is the mean of what these say of its chunks, so that recovery is not
needed; but each chunk costs a forward and a backward pass for every query.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from stride_cli.errors import UsageError
from stride_cli.operators.gates import gate_responses
from stride_cli.operators.gradients import gate_gradients, gradient_products
from stride_cli.output import progress

if TYPE_CHECKING:
    from stride_cli.data.batches import Batch, ChunkReader
    from stride_cli.data.query_set import QuerySet
    from stride_cli.data.workspace import Workspace
    from stride_cli.operators.steered_model import SteeredModel
    from stride_cli.operators.store import Operators


def query_gradients(steered: SteeredModel, batches: Sequence[Batch]) -> list[torch.Tensor]:
    """Gate gradients of queries, one (Q, p) float32 on the CPU a space; batches are taken as they come."""
    kept: list[list[torch.Tensor]] = [[] for _ in steered.spaces]
    for batch in batches:
        for part, gradient in zip(kept, gate_gradients(steered, batch)[0], strict=True):
            part.append(gradient.cpu())
    return [torch.cat(parts) for parts in kept]


def direct_scale(operators: Operators) -> float:
    """Factor of a chunk's gate gradient in the unit of the gates.

    Raises
    ------
    UsageError      the operators' gates are not what single chunks' gradients add up to
    """
    if operators.direct_scale is None:
        raise UsageError(
            "--refine reads single chunks in the gates' own units, which these operators do not have",
            fix="fit a language model's operators by the default, in closed form with Kronecker factors "
            "(stride train --overwrite), or leave --refine out",
        )
    return operators.direct_scale


def projected_influences(
    models: Iterable[SteeredModel], batches: Sequence[Batch], n_chunks: int
) -> np.ndarray | None:
    """Estimates of every chunk's influence from its projection, of each query at mean 0 and variance 1.

    The error of an estimate is as large as the chunk's gradient. Estimates are divided by the root of that:
    halfway to units of their errors the 100 highest hold more of the 50 strongest chunks (instructions: .43
    for .37 at 512 bytes a chunk) and as many of the 10 strongest.

    Parameters
    ----------
    models : with their operators
    batches : the Q queries, in order
    n_chunks : n                    chunks appended later have no projection: 0, the mean

    Returns
    -------
    ndarray (Q, n) float64          the mean over the models that have projections; None where none has
    """
    total: np.ndarray | None = None
    for steered in models:
        projections = steered.operators.projections
        if projections is None:
            continue
        found = projections.products(query_gradients(steered, batches)).astype(np.float64)
        size = np.sqrt(projections.step)
        np.divide(found, size, out=found, where=size > 0)
        if total is None:
            total = np.zeros((len(found), n_chunks))
        total[:, : found.shape[1]] += _standardised(found)
    if total is not None:
        total /= np.maximum(total.std(axis=1, keepdims=True), np.finfo(float).tiny)
    return total


def second_estimates(
    models: Iterable[SteeredModel],
    queries: QuerySet,
    batches: Sequence[Batch],
    workspace: Workspace,
) -> np.ndarray:
    """What says, beside the recovery, which chunks are worth a direct look: the pairs of tokens that a chunk
    shares with the query, and projections, where the operators have them.

    Parameters
    ----------
    models : with their operators
    queries : Q queries
    batches : the same, in order
    workspace : the n chunks, in the model's vocabulary

    Returns
    -------
    ndarray (Q, n) float64          of each query at mean 0 and variance 1 (0 where all are equal)
    """
    from stride_cli.attribution.shared_pairs import shared_pairs

    shared = shared_pairs(queries, workspace.chunks, workspace.model.vocab_size)
    found = _standardised(shared.astype(np.float64))
    projected = projected_influences(models, batches, workspace.n_chunks)
    return found if projected is None else _standardised(found + projected)


def _standardised(values: np.ndarray) -> np.ndarray:
    """Each row at mean 0 and variance 1 (0 where all are equal), in place."""
    values -= values.mean(axis=1, keepdims=True)
    spread = values.std(axis=1, keepdims=True)
    np.divide(values, spread, out=values, where=spread > 0)
    return values


def chunk_influences(
    models: Iterable[SteeredModel],
    batches: Sequence[Batch],
    chunks: ChunkReader,
    rows: np.ndarray,
    responses: np.ndarray,
    row_sizes: np.ndarray,
    *,
    intercept: bool = True,
) -> np.ndarray:
    """Influences of the given chunks, in the unit of the recovered ones.

        w_i = (s_i − s̄) / m̄,      s_i = share_i g_i · g_x / λ_stab

    s̄ is the mean over all chunks, which the subsets' responses tell, m̄ the subsets' mean size; see
    `additive_measurement`. Of several models the mean, each on the scale of the first.

    Parameters
    ----------
    models : with their operators, the index's own first
    batches : the Q queries, in order
    rows : (t,) int64               distinct chunks
    responses : (Q, C K) float64    of `stack_checkpoints`
    row_sizes : (K,) or (C, K)      |A_k|
    intercept : bool                whether recovery fits one; without, s̄ is 0

    Returns
    -------
    ndarray (Q, t) float64

    Raises
    ------
    UsageError      the operators' gates are not what single chunks' gradients add up to
    """
    total = np.zeros((len(responses), len(rows)))
    sizes = np.atleast_2d(np.asarray(row_sizes, np.float64))
    for number, steered in enumerate(models):
        operators = steered.operators
        scale = direct_scale(operators)
        asked = query_gradients(steered, batches)
        own = np.asarray(responses)[:, number * operators.n_subsets : (number + 1) * operators.n_subsets]
        with progress("reading chunks", len(rows), unit="chunks") as bar:
            products = gradient_products(steered, asked, chunks, rows, advance=bar.advance)
        single = scale * products.sum(axis=0)
        if number:  # the others' responses were put on the scale of the first model's
            raw = sum(
                gate_responses(gates, query.numpy())
                for gates, query in zip(operators.gates, asked, strict=True)
            )
            spread = np.std(raw, axis=1, keepdims=True)
            ratio = np.std(own, axis=1, keepdims=True)
            single *= np.divide(ratio, spread, out=np.zeros_like(spread), where=spread > 0)
        middle = (own * sizes[number]).sum(axis=1, keepdims=True) / max(1.0, sizes[number].sum())
        total += (single - (middle if intercept else 0.0)) / max(1.0, sizes[number].mean())
    influences: np.ndarray = total / len(sizes)
    return influences
