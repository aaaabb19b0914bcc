"""Data-driven bases: principal directions of activations and of loss gradients, from a sample of chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from stride_cli.operators.batches import Batch, ChunkReader
from stride_cli.operators.gradients import signals
from stride_cli.operators.spaces import (
    LogitSpace,
    OperatorSpace,
    ResidualMatrixSpace,
    ResidualSpace,
    layer_norm,
    vocabulary_buckets,
)
from stride_cli.randomness import stream

if TYPE_CHECKING:
    from stride_cli.models.adapter import CausalLM

SAMPLE_TOKENS = 65_536  # second moments of d ≤ 4,096 directions are well determined by 16 tokens each


def label_uniforms(seed: int, batch: Batch) -> np.ndarray:
    """Uniforms (B, T) that draw the Fisher labels: one stream per chunk, whatever the batching."""
    length = batch.ids.shape[1]
    return np.stack([stream(seed, "fisher labels", int(row)).random(length) for row in batch.rows])


def fit_bases(
    model: CausalLM,
    chunks: ChunkReader,
    names: Sequence[str],
    layer: int,
    *,
    ranks: dict[str, int],
    n_buckets: int,
    seed: int,
    batch_tokens: int,
) -> list[OperatorSpace]:
    """Spaces whose bases are the leading principal directions on a random sample of the corpus.

    Activations enter as LN(h), uncentred; gradients are those of labels drawn from the model, so that the
    directions are the ones in which the model's own distribution is most sensitive.

    Parameters
    ----------
    names : space names, as from `parse_space`
    ranks : rank of each space by name; clipped to d
    n_buckets : c of the logit space

    Returns
    -------
    list of OperatorSpace, in the order of ``names``
    """
    # second moments; a classifier's activations have widths of their own at every layer
    inner = outer = last = torch.zeros(0, 0, dtype=torch.float64)
    residual = any(name != "logit" for name in names)
    probe = [ResidualSpace(torch.zeros(1, 1), torch.zeros(1, 1)).to(model.device)] if residual else []
    for batch in chunks.batches(batch_tokens, _sample(chunks, seed)):
        _, drawn = signals(model, probe, layer, batch, sampled=label_uniforms(seed, batch))
        assert drawn is not None
        # position t is used when it predicts a scored token t + 1
        used = torch.nn.functional.pad(batch.weights[:, 1:] > 0, (0, 1)).to(model.device)
        last = _add_moment(last, layer_norm(drawn.final)[used])
        if drawn.pull is not None:
            inner = _add_moment(inner, layer_norm(drawn.hidden)[used])
            # per token again: each row's loss is a mean over its scored tokens
            per_token = drawn.pull.double() * batch.scored.to(model.device)[:, None, None]
            outer = _add_moment(outer, per_token[used])
    spaces: list[OperatorSpace] = []
    for name in names:
        rank = min(ranks[name], len(last if name == "logit" else inner))
        if name == "residual":
            spaces.append(ResidualSpace(_leading(inner, rank).T, _leading(outer, rank)))
        elif name == "residual-matrix":
            spaces.append(ResidualMatrixSpace(_leading(inner, rank).T, _leading(outer, rank)))
        else:
            bucket, sign = vocabulary_buckets(model.vocab_size, n_buckets, seed)
            spaces.append(LogitSpace(_leading(last, rank).T, bucket, sign))
    return [space.to(model.device).requires_grad_(False) for space in spaces]


def _add_moment(moment: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Moment (d, d) float64 plus the rows' (N, d) own; an empty moment is zero."""
    rows = values.double()
    own = (rows.T @ rows).cpu()
    return moment + own if len(moment) else own


def _sample(chunks: ChunkReader, seed: int) -> np.ndarray:
    """Random chunks that hold about SAMPLE_TOKENS tokens, ascending."""
    order = stream(seed, "basis sample").permutation(chunks.n_chunks)
    enough = int(np.searchsorted(np.cumsum(chunks.lengths[order]), SAMPLE_TOKENS)) + 1
    return np.sort(order[:enough])


def _leading(moment: torch.Tensor, rank: int) -> torch.Tensor:
    """Leading eigenvectors of a second moment, (d, rank) float32, each with a positive largest entry."""
    _, vectors = torch.linalg.eigh(moment)
    leading = vectors.flip(1)[:, :rank]
    largest = leading.gather(0, leading.abs().argmax(dim=0, keepdim=True))
    return (leading * largest.sign()).float()
