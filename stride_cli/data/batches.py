"""Chunks of an index as padded batches of token ids and loss weights."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from index_format.design import offsets_of
from index_format.errors import IndexDamaged
from index_format.shards import ranges

if TYPE_CHECKING:
    from index_format.reader import Index
    from stride_cli.models.length_kinds import LengthKinds
    from stride_cli.models.protocol import AttributableModel

_FEW_TOKENS = 1 << 16
TOGETHER = 8  # chunks whose gate gradients are held together, in memory
_WINDOW = 256  # chunks sorted by length together: little padding, order still close to the index's


@dataclass(frozen=True)
class Batch:
    """A right-padded batch of sequences.

    Attributes
    ----------
    rows : (B,) int64              which chunk (or query) each row is
    ids : (B, T) int64             token ids; padding is 0 and is never scored
    weights : (B, T) float32       ω of the paper's fidelity loss: 1 where the token is scored, else 0
    before : (B, T) float32        of chunks, where it is known: 1 − p of each token before training
    parts : (Q, B) float32         of queries that are made of several rows: query q's loss is Σ_b parts_qb
                                   times the loss of row b. None: each row is a query
    """

    rows: np.ndarray
    ids: torch.Tensor
    weights: torch.Tensor
    before: torch.Tensor | None = None
    parts: np.ndarray | None = None

    @property
    def scored(self) -> torch.Tensor:
        """Scored tokens of each row, (B,) float32."""
        return self.weights.sum(dim=1)

    def of_queries(self, values: np.ndarray) -> np.ndarray:
        """Sum values of rows (B, …), linear in the loss, over each query's rows: (Q, …)."""
        return values if self.parts is None else np.tensordot(self.parts.astype(values.dtype), values, 1)

    def losses_of_queries(self, losses: np.ndarray) -> np.ndarray:
        """Mean loss of each response, (Q,), from the losses of rows, (B,), without the other response's."""
        if self.parts is None:
            return losses
        said = np.maximum(self.parts, 0.0).astype(losses.dtype)
        return np.asarray(said @ losses / said.sum(axis=1))

    def take(self, rows: slice) -> Batch:
        """Some of its rows, each by itself."""
        before = None if self.before is None else self.before[rows]
        return Batch(self.rows[rows], self.ids[rows], self.weights[rows], before)


@dataclass(frozen=True)
class RememberingBatch(Batch):
    """A batch that keeps what models' passes over it gave, for as long as it lives.

    Measurement, projections, exact gradients and passages all ask for the queries' gradients.

    Attributes
    ----------
    passes : dict      number of an object (`id`) → the object, and what its pass gave
    """

    passes: dict[int, tuple[Any, Any]] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(cls, batch: Batch) -> RememberingBatch:
        """The batch; itself where it is one already."""
        if isinstance(batch, RememberingBatch):
            return batch
        return cls(batch.rows, batch.ids, batch.weights, parts=batch.parts)

    def remembered(self, of: Any, compute: Callable[[], Any]) -> Any:
        """Return what `compute` gave when it was first called for this object."""
        if id(of) not in self.passes:
            self.passes[id(of)] = of, compute()
        return self.passes[id(of)][1]


def scored_pairs(ids: np.ndarray, weights: np.ndarray, vocab_size: int) -> np.ndarray:
    """x V + y of each token x of a sequence and the scored token y right after it, in order: (N,) int64."""
    ids = np.asarray(ids, np.int64)
    pairs: np.ndarray = (ids[:-1] * vocab_size + ids[1:])[np.asarray(weights)[1:] > 0]
    return pairs


def consecutive_groups(
    lengths: Sequence[int] | np.ndarray, batch_tokens: int, kinds: LengthKinds | None = None
) -> list[np.ndarray]:
    """Positions 0 … len − 1 in order, in groups of one kind and at most ``batch_tokens`` padded tokens, one
    at least; `lengths` are in tokens."""
    groups: list[np.ndarray] = []
    first, longest, own = 0, 0, _kinds_of(lengths, kinds)
    for position, length in enumerate(lengths):
        longest = max(longest, int(length))
        full = longest * (position + 1 - first) > batch_tokens
        if position > first and (full or own[position] != own[first]):
            groups.append(np.arange(first, position))
            first, longest = position, int(length)
    if len(lengths):
        groups.append(np.arange(first, len(lengths)))
    return groups


def little_padding(lengths: Sequence[int], kinds: LengthKinds | None = None) -> list[list[int]]:
    """Positions of sequences in groups of one kind, shortest first, at most half of a batch being padding."""
    groups: list[list[int]] = []
    held, own = 0, _kinds_of(lengths, kinds)  # tokens of the last group
    for place in sorted(range(len(lengths)), key=lambda at: lengths[at]):
        held += lengths[place]
        half = bool(groups) and lengths[place] * (len(groups[-1]) + 1) > 2 * held
        if not groups or half or own[groups[-1][0]] != own[place]:
            groups.append([])
            held = lengths[place]
        groups[-1].append(place)
    return groups


def _kinds_of(lengths: Sequence[int] | np.ndarray, kinds: LengthKinds | None) -> np.ndarray:
    return np.zeros(len(lengths), np.int64) if kinds is None else kinds(lengths)


def pad_batch(rows: np.ndarray, tokens: list[np.ndarray], weights: list[np.ndarray]) -> Batch:
    """Right-pad sequences of unequal length to one batch."""
    longest = max(2, *(len(row) for row in tokens))  # one token predicts nothing, but has a place to predict
    ids = torch.zeros(len(tokens), longest, dtype=torch.int64)
    mask = torch.zeros(len(tokens), longest, dtype=torch.float32)
    for position, (row, weight) in enumerate(zip(tokens, weights, strict=True)):
        # copies: torch warns of arrays that are mapped read-only
        ids[position, : len(row)] = torch.from_numpy(np.array(row, dtype=np.int64))
        mask[position, : len(row)] = torch.from_numpy(np.array(weight, dtype=np.float32))
    return Batch(rows, ids, mask)


class ChunkReader:
    """The chunks of an index, by number.

    Parameters
    ----------
    index : Index
    model : AttributableModel, optional
        The one that reads them: it has all their tokens, and its `length_kinds` are batched apart.
    """

    def __init__(self, index: Index, model: AttributableModel | None = None) -> None:
        # of a classifier, tokens are rows and labels
        self._vocab_size = None if model is None or model.table is not None else model.vocab_size
        self._index, self._kinds = index, None if model is None else model.length_kinds
        # mapped, in one file or several: a query looks at a few chunks of what may be 10⁸
        self.tokens = index.array("corpus/tokens")
        self.offsets = index.array("corpus/chunk_offsets")
        self.loss_start = index.array("corpus/loss_start")
        self.loss_mask = index.array("corpus/loss_mask") if index.has("corpus/loss_mask") else None
        self.n_chunks = len(self.offsets) - 1
        self._scored: int | None = None

    @cached_property
    def lengths(self) -> np.ndarray:
        """Tokens of each chunk, (n,) int64: what passes over the corpus go by."""
        return np.diff(np.asarray(self.offsets))

    @property
    def mean_length(self) -> float:
        """Tokens of the mean chunk; 1 where there is none."""
        return int(self.offsets[-1]) / self.n_chunks if self.n_chunks else 1.0

    @cached_property
    def before(self) -> Any:
        """Residuals of tokens before training, packed, of the first chunks at least, or None. Fits set it."""
        if not self._index.has(BEFORE):
            return None
        found = self._index.array(BEFORE)
        if found.dtype != np.uint8 or found.ndim != 1 or not self._ends_chunk(len(found)):
            raise IndexDamaged(
                f"{BEFORE} of index {self._index.path} is no byte for each token of its first chunks (found "
                f"{found.dtype}, shape {found.shape})",
                fix="fit operators anew: stride train --overwrite",
            )
        return found

    def _ends_chunk(self, token: int) -> bool:
        """True where a chunk ends before that token, or none comes before it."""
        chunk = bisect_left(range(self.n_chunks), token, key=lambda number: int(self.offsets[number]))
        return int(self.offsets[chunk]) == token

    def chunk(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """Token ids (T,) and loss weights (T,) of one chunk."""
        start, stop = int(self.offsets[row]), int(self.offsets[row + 1])
        weights = (np.arange(stop - start) >= max(1, int(self.loss_start[row]))).astype(np.float32)
        if self.loss_mask is not None:
            weights *= np.asarray(self.loss_mask[start:stop])
        return self.span(start, stop), weights

    def span(self, start: int, stop: int) -> np.ndarray:
        """Tokens start … stop-1 of all chunks joined; IndexDamaged where the model does not have one."""
        tokens = np.asarray(self.tokens[start:stop])
        if self._vocab_size is not None and len(tokens) and int(tokens.max()) >= self._vocab_size:
            raise IndexDamaged(
                f"index {self._index.path} has token {tokens.max()} (the model has {self._vocab_size})",
                fix="no build of stride writes that: build the index again from the corpus",
            )
        return tokens

    def scored_tokens(self) -> int:
        """Number of scored tokens of the corpus."""
        if self._scored is None:
            scored = 0
            for start, stop in ranges(self.n_chunks, width=int(self.mean_length) + 1):
                ends = np.asarray(self.offsets[start : stop + 1])
                first = np.minimum(ends[:-1] + np.maximum(1, self.loss_start[start:stop]), ends[1:])
                if self.loss_mask is not None:  # places among the tokens that the mask lets through
                    kept = offsets_of(self.loss_mask[ends[0] : ends[-1]])
                    first, ends = kept[first - ends[0]], kept[ends - ends[0]]
                scored += int((ends[1:] - first).sum())
            self._scored = scored
        return self._scored

    @cached_property
    def typical(self) -> float:
        """Scored tokens of the mean chunk, 1 at least."""
        return max(1.0, self.scored_tokens() / self.n_chunks)

    def share(self, batch: Batch) -> torch.Tensor:
        """Weight of each chunk in a fit, (B, 1) float32: its scored tokens, by those of the mean chunk.

        L_fid sums over a chunk's tokens: a tail of three tokens weighs three tokens, not a chunk.
        """
        return (batch.scored / self.typical)[:, None]

    def batch(self, rows: np.ndarray) -> Batch:
        """The given chunks as one batch."""
        pairs = [self.chunk(int(row)) for row in rows]
        batch = pad_batch(np.asarray(rows), [pair[0] for pair in pairs], [pair[1] for pair in pairs])
        return batch if self.before is None else replace(batch, before=self._before(rows, batch.ids.shape))

    def _before(self, rows: np.ndarray, shape: tuple[int, ...]) -> torch.Tensor:
        """1 − p of tokens before training, padded with 1; of chunks appended since, as of the usual token."""
        found = torch.ones(shape, dtype=torch.float32)
        for position, row in enumerate(np.asarray(rows).tolist()):
            start, stop = int(self.offsets[row]), int(self.offsets[row + 1])
            if stop <= len(self.before):
                found[position, : stop - start] = torch.from_numpy(
                    unpacked(np.asarray(self.before[start:stop]))
                )
            else:
                found[position] = self._usual_before
        return found

    @cached_property
    def _usual_before(self) -> float:
        mean = float(unpacked(np.asarray(self.before[:_FEW_TOKENS])).mean())
        share = max(1, self.scored_tokens()) / int(self.offsets[-1])
        return float(np.clip(1.0 - (1.0 - mean) / share, 0.0, 1.0))  # tokens that are not scored have 1

    def plan(self, batch_tokens: int, rows: np.ndarray | None = None) -> list[np.ndarray]:
        """Chunk numbers grouped into batches of at most ``batch_tokens`` padded tokens, in a fixed order.

        The grouping depends on nothing but the lengths, so that interrupted passes continue exactly.
        """
        if rows is None:
            rows, lengths = np.arange(self.n_chunks), self.lengths
        else:  # of a few chunks, not of all
            rows = np.asarray(rows)
            lengths = np.asarray(self.offsets[rows + 1]) - np.asarray(self.offsets[rows])
        groups: list[np.ndarray] = []
        for start in range(0, len(rows), _WINDOW):
            own = lengths[start : start + _WINDOW]
            order = np.argsort(-own, kind="stable")
            window, own = rows[start : start + _WINDOW][order], own[order]
            position = 0
            while position < len(window):
                longest = max(1, int(own[position]))
                size = max(1, batch_tokens // longest)
                alike = _kinds_of(own[position : position + size], self._kinds)
                size = int((alike == alike[0]).sum())  # the longest come first
                groups.append(window[position : position + size])
                position += size
        return groups

    @staticmethod
    def small_groups(rows: np.ndarray, most: int = TOGETHER) -> list[np.ndarray]:
        """Chunks in parts whose gate gradients fit in memory together: so many at most."""
        return np.array_split(rows, -(-len(rows) // most))

    def batches(self, batch_tokens: int, rows: np.ndarray | None = None) -> Iterator[Batch]:
        """All chunks (or the given ones), batch by batch."""
        for group in self.plan(batch_tokens, rows):
            yield self.batch(group)


def token_losses(model: Any, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Losses of scored tokens, in float64 from float32 logits, without their weights; differentiable.

    Parameters
    ----------
    model : AttributableModel, or a classifier with its interface

    Returns
    -------
    (S,) the row of each, in order; (S,) its place there, less one; (S,) its loss, nats
    """
    ids, weights = batch.ids.to(model.device), batch.weights.to(model.device)
    final = model.continue_from(model.hidden(ids, 0), 0)  # (B, T, d)
    row, position = torch.nonzero(weights[:, 1:], as_tuple=True)  # token position + 1 is predicted here
    logits = model.logits(final[row, position]).float()
    losses = torch.nn.functional.cross_entropy(logits, ids[row, position + 1], reduction="none")
    return row, position, losses.double()


def row_losses(model: Any, batch: Batch) -> torch.Tensor:
    """Summed loss of each row's scored tokens, (B,), as of `token_losses`."""
    row, position, losses = token_losses(model, batch)
    losses = losses * batch.weights.to(losses.device)[row, position + 1]
    return torch.zeros(len(batch.ids), dtype=torch.float64, device=losses.device).index_add(0, row, losses)


BEFORE = "operators/before"  # of each token of the corpus, by the model before it was trained on it
_STEPS = 8  # of each halving
_LEAST = 1e-12


def packed(residuals: np.ndarray) -> np.ndarray:
    """Residuals, 0 … 1, as uint8; 2^(−255/8) at the least."""
    halvings = -_STEPS * np.log2(np.maximum(residuals, _LEAST))
    return np.clip(np.rint(halvings), 0, 255).astype(np.uint8)


def unpacked(codes: np.ndarray) -> np.ndarray:
    """The inverse of `packed`, float32, to 4.5 %."""
    return np.exp2(codes.astype(np.float32) / -_STEPS)
