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
from stride_cli.operators.budget import tokens_at_once
from stride_cli.operators.gates import gate_responses
from stride_cli.operators.gradients import gate_gradients
from stride_cli.output import progress

if TYPE_CHECKING:
    from stride_cli.models.adapter import CausalLM
    from stride_cli.operators.batches import Batch, ChunkReader
    from stride_cli.operators.spaces import OperatorSpace
    from stride_cli.operators.store import Operators


def gradient_products(
    model: CausalLM,
    spaces: Sequence[OperatorSpace],
    layer: int,
    queries: Sequence[torch.Tensor],
    chunks: ChunkReader,
    rows: np.ndarray | None = None,
    *,
    batch_tokens: int | None = None,
) -> np.ndarray:
    """Products of the queries' gate gradients with those of chunks, space by space.

    Parameters
    ----------
    queries : one (Q, p) float32 a space, on the CPU
    chunks : ChunkReader
    rows : (t,) int64, optional     which chunks, distinct; default: all n
    batch_tokens : int, optional    padded tokens at once; default: what memory allows

    Returns
    -------
    ndarray (spaces, Q, t) float64      share_i g_x · g_i, with share_i the chunk's scored tokens by the
                                        corpus's mean, as the fit weighs it

    Raises
    ------
    NumericalError      a loss is not finite
    """
    rows = np.arange(chunks.n_chunks) if rows is None else np.asarray(rows, np.int64)
    place = np.full(chunks.n_chunks, -1, np.int64)
    place[rows] = np.arange(len(rows))
    typical = max(1.0, chunks.scored_tokens() / chunks.n_chunks)
    tokens = batch_tokens or tokens_at_once(model, [space.name for space in spaces], layer)
    found = np.zeros((len(spaces), len(queries[0]), len(rows)))
    with progress("reading chunks", len(rows), unit="chunks") as bar:
        for batch in chunks.batches(tokens, rows):
            gradients = gate_gradients(model, spaces, layer, batch)[0]
            share = (batch.scored / typical)[:, None]
            for number, (query, gradient) in enumerate(zip(queries, gradients, strict=True)):
                products = query @ (gradient.cpu() * share).T
                found[number][:, place[batch.rows]] = products.numpy()
            bar.advance(len(batch.rows))
    return found


def query_gradients(
    model: CausalLM, spaces: Sequence[OperatorSpace], layer: int, batches: Sequence[Batch]
) -> list[torch.Tensor]:
    """Gate gradients of queries, one (Q, p) float32 on the CPU a space; batches are taken as they come."""
    kept: list[list[torch.Tensor]] = [[] for _ in spaces]
    for batch in batches:
        for part, gradient in zip(kept, gate_gradients(model, spaces, layer, batch)[0], strict=True):
            part.append(gradient.cpu())
    return [torch.cat(parts) for parts in kept]


def chunk_influences(
    pairs: Iterable[tuple[CausalLM, Operators]],
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
    pairs : models with their operators, the index's own first
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
    for number, (model, operators) in enumerate(pairs):
        scale = operators.direct_scale
        if scale is None:
            raise UsageError(
                "--refine reads single chunks in the gates' own units, which these operators do not have",
                fix="fit a language model's operators by the default, in closed form with Kronecker factors "
                "(stride train --overwrite), or leave --refine out",
            )
        spaces = [space.to(model.device) for space in operators.spaces]
        asked = query_gradients(model, spaces, operators.layer, batches)
        own = np.asarray(responses)[:, number * operators.n_subsets : (number + 1) * operators.n_subsets]
        single = scale * gradient_products(model, spaces, operators.layer, asked, chunks, rows).sum(axis=0)
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
