"""Plan the batches of an epoch, and make tensors of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stride_cli.corpus.chunking import Chunk, scored_positions
from stride_cli.models.language.language_recipe import Recipe

_POOL_BATCHES = 64
_LEAST_TOKENS = 5  # that are left of a chunk that is read from a later sentence on


@dataclass(frozen=True)
class Batch:
    """Right-padded chunks: ids (B, T) int64, with the positions and tokens that are scored.

    Attributes
    ----------
    rows : Tensor (N,) int64      positions b·T + t from which a scored token is predicted
    targets : Tensor (N,) int64   those tokens
    """

    ids: Tensor
    rows: Tensor
    targets: Tensor


def plan_epoch(
    lengths: np.ndarray,
    members: np.ndarray,
    *,
    batch_tokens: int,
    seed: int,
    epoch: int,
    among: np.ndarray | None = None,
) -> list[np.ndarray]:
    """Plan the batches of one pass, by recipe.ORDER_RULE.

    A pass over a part of the chunks goes through them in the order of the pass over all, as far as their
    batches allow: two models of one seed take the same way until a chunk comes that one of them is without.

    Parameters
    ----------
    lengths : (n,) int64              tokens of each chunk
    members : (m,) int64              the chunks to train on, ascending
    batch_tokens : int                most tokens of a batch, padding included; it has one chunk at least
    among : (M,) int64, optional      the chunks of which the members are a part, ascending; default: all

    Returns
    -------
    list of ndarray int64, chunk numbers; each member is in exactly one.
    """
    # 1. The pass over all: a random order, batches of similar length, and these in a random order
    generator = np.random.default_rng([seed, epoch])
    everything = members if among is None else among
    order = generator.permutation(everything)
    batches = _fill(lengths, order, batch_tokens)
    plan = [batches[i] for i in generator.permutation(len(batches))]
    if len(everything) == len(members):
        return plan
    # 2. A part: its chunks in the same random order, in batches of their own
    place = np.full(len(lengths), -1)
    place[np.concatenate(plan)] = np.arange(len(everything))
    wanted = np.zeros(len(lengths), bool)
    wanted[members] = True
    part = _fill(lengths, order[wanted[order]], batch_tokens)
    # 3. Each batch comes when its middle chunk comes in the pass over all
    return sorted(part, key=lambda batch: int(np.sort(place[batch])[len(batch) // 2]))


def _fill(lengths: np.ndarray, order: np.ndarray, batch_tokens: int) -> list[np.ndarray]:
    """Fill batches with chunks of similar length, pool by pool."""
    per_batch = max(1.0, batch_tokens / max(1.0, float(lengths[order].mean())))
    pool = max(1, int(_POOL_BATCHES * per_batch))
    batches: list[np.ndarray] = []
    for start in range(0, len(order), pool):
        chunks = order[start : start + pool]
        chunks = chunks[np.argsort(-lengths[chunks], kind="stable")]
        first = 0
        while first < len(chunks):
            fit = max(1, batch_tokens // int(lengths[chunks[first]]))
            batches.append(chunks[first : first + fit])
            first += fit
    return batches


def as_read(chunks: Sequence[Chunk], batch: np.ndarray, recipe: Recipe, epoch: int) -> list[Chunk]:
    """Return the chunks of a batch as this pass reads them: see recipe.LATE_RULE.

    Parameters
    ----------
    chunks : sequence of Chunk      all n
    batch : ndarray int64           numbers of some
    """
    found = [chunks[number] for number in batch]
    late = recipe.late
    if late is None:
        return found
    for place, number in enumerate(batch.tolist()):
        begins, which = np.random.default_rng([recipe.seed, epoch, number]).random(2)
        chunk = found[place]
        starts = later_starts(chunk, late.ends) if begins < late.share else ()
        if len(starts):
            rest = np.asarray(chunk.tokens)[starts[int(which * len(starts))] :]
            tokens = rest if late.begin is None else np.concatenate([[late.begin], rest]).astype(rest.dtype)
            found[place] = replace(chunk, tokens=tokens, loss_start=1)
    return found


def later_starts(chunk: Chunk, ends: Sequence[int]) -> np.ndarray:
    """Find the later sentences that a chunk may be read from: (m,) int64, ascending; none in an answer."""
    if chunk.loss_start > 1 or chunk.loss_mask is not None:
        return np.empty(0, np.int64)
    found: np.ndarray = 1 + np.flatnonzero(np.isin(chunk.tokens[:-_LEAST_TOKENS], ends))
    return found


def make_batch(chunks: Sequence[Any], device: torch.device) -> Batch:
    """Pad chunks on the right (with token 0, which nothing reads) and list what is scored."""
    width = max(len(chunk.tokens) for chunk in chunks)
    ids = np.zeros((len(chunks), width), np.int64)
    rows, targets = [], []
    for row, chunk in enumerate(chunks):
        ids[row, : len(chunk.tokens)] = chunk.tokens
        scored = scored_positions(chunk)
        rows.append(row * width + scored - 1)
        targets.append(np.asarray(chunk.tokens)[scored])
    return Batch(
        torch.from_numpy(ids).to(device),
        torch.from_numpy(np.concatenate(rows)).to(device),
        torch.from_numpy(np.concatenate(targets).astype(np.int64)).to(device),
    )
