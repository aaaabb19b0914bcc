"""Pairs of neighbouring tokens that chunks share with a query: what a model of nothing but bigrams would say.

Small language models learn such pairs first, and a rare one from the few chunks that hold it. No model takes
part, and nothing is stored: the corpus is read once for all queries together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from stride_cli.data.batches import scored_pairs

if TYPE_CHECKING:
    from scipy import sparse

    from stride_cli.data.batches import ChunkReader
    from stride_cli.data.query_set import QuerySet

_TOKENS = 1 << 20  # of the corpus read at once


def pair_scores(queries: QuerySet, chunks: ChunkReader, vocab_size: int) -> PairScores:
    """Score every chunk by the pairs that it shares with every query:

        score_i = Σ_g  count_g(query) · count_g(i) / (count_g(corpus) + 1),

    over pairs g of a token and the scored one right after it. To first order, what a maximum-likelihood model
    of bigrams would answer when a chunk is taken away. Most chunks share none, and are not kept.

    Parameters
    ----------
    queries : Q sequences of token ids
    chunks : the n chunks, in the same vocabulary
    vocab_size : V
    """
    from scipy import sparse

    asked = [
        scored_pairs(ids, weights, vocab_size)
        for ids, weights in zip(queries.ids, queries.weights, strict=True)
    ]
    known, column = np.unique(np.concatenate(asked), return_inverse=True)  # (G,), ascending
    row = np.repeat(np.arange(len(asked)), [len(pairs) for pairs in asked])
    wanted = sparse.csr_array((np.ones(len(row)), (row, column)), (len(asked), len(known)))
    rows, held = _occurrences(chunks, known, vocab_size)
    total = held.sum(axis=0)
    rarity = np.divide(1.0, total + 1.0, out=np.zeros(len(known)), where=total > 0)
    return PairScores(rows, held.T.tocsr(), wanted.multiply(rarity).tocsr(), chunks.n_chunks)


@dataclass(frozen=True)
class PairScores:
    """Pairs that chunks share with Q queries: see `pair_scores`.

    Attributes
    ----------
    chunks : (m,) int64                  that share a pair with any query, ascending
    held : (G, m) sparse float64         how often each pair is in each
    weights : (Q, G) sparse float64      of pairs, for each query
    n_chunks : n
    """

    chunks: np.ndarray
    held: sparse.csr_array
    weights: sparse.csr_array
    n_chunks: int

    def of(self, query: int) -> QueryPairs:
        """The scores of one query."""
        found = (self.weights[[query]] @ self.held).tocoo()
        place, values = found.coords[1], found.data
        order = np.argsort(place)
        # float32, as scores are elsewhere
        values = values[order].astype(np.float32).astype(np.float64)
        count = max(1, self.n_chunks)
        mean = float(values.sum()) / count
        squares = float(np.square(values - mean).sum()) + (count - len(values)) * mean**2
        return QueryPairs(
            self.chunks[place[order]], values, self.n_chunks, mean, float(np.sqrt(squares / count))
        )


@dataclass(frozen=True)
class QueryPairs:
    """Pairs that chunks share with one query.

    Attributes
    ----------
    chunks : (m,) int64        that share any pair, ascending
    scores : (m,) float64      of these; others have 0
    n_chunks : n
    mean, deviation : of the scores of all n
    """

    chunks: np.ndarray
    scores: np.ndarray
    n_chunks: int
    mean: float
    deviation: float

    @property
    def varied(self) -> bool:
        """False where all scores are the same."""
        return self.deviation > 0

    def standard(self, rows: slice | np.ndarray) -> np.ndarray:
        """At mean 0 and variance 1 (0 where all are the same): of a range of chunks, or of given ones."""
        if isinstance(rows, slice):
            first, last = np.searchsorted(self.chunks, [rows.start, rows.stop])
            places, some = self.chunks[first:last] - rows.start, np.arange(first, last)
            found = np.zeros(rows.stop - rows.start)
        else:
            found = np.zeros(len(rows))
            _, places, some = np.intersect1d(rows, self.chunks, assume_unique=True, return_indices=True)
        found[places] = self.scores[some]
        return (found - self.mean) / (self.deviation or 1.0)


def _occurrences(
    chunks: ChunkReader, known: np.ndarray, vocab_size: int
) -> tuple[np.ndarray, sparse.csr_array]:
    """The chunks that hold any of these pairs, (m,) int64 ascending, and how often each does, (m, G)."""
    from scipy import sparse

    begins, ends = np.zeros((2, vocab_size), bool)  # whether a token begins or ends any pair: most do not
    begins[known // vocab_size] = True
    ends[known % vocab_size] = True
    holders: list[np.ndarray] = []
    parts = []
    first = 0
    while first < chunks.n_chunks:
        # chunks of so many tokens, one at least
        offsets = np.asarray(chunks.offsets[first : first + _TOKENS + 1]).astype(np.int64)
        count = int(np.searchsorted(offsets, offsets[0] + _TOKENS, side="right")) - 1
        stop = first + min(max(count, 1), len(offsets) - 1)
        offsets = offsets[: stop - first + 1]
        start, end = int(offsets[0]), int(offsets[-1])
        tokens = chunks.span(start, end)
        places = np.flatnonzero(begins[tokens[:-1]] & ends[tokens[1:]])
        pairs = tokens[places].astype(np.int64) * vocab_size + tokens[places + 1]
        at = np.minimum(np.searchsorted(known, pairs), len(known) - 1)
        found = known[at] == pairs
        places, at = places[found] + 1 + start, at[found]  # where the second token is
        rows = np.searchsorted(offsets, places, side="right") - 1
        # a chunk's first token is not scored: no pair reaches across
        begin = np.asarray(chunks.loss_start[first:stop])[rows]
        scored = places - offsets[rows] >= np.maximum(1, begin)
        if chunks.loss_mask is not None:
            scored &= np.asarray(chunks.loss_mask[start:end])[places - start] > 0
        own, rows = np.unique(rows[scored], return_inverse=True)
        at = at[scored]
        parts.append(sparse.csr_array((np.ones(len(rows)), (rows, at)), (len(own), len(known))))
        holders.append(first + own)
        first = stop
    if not parts:
        return np.zeros(0, np.int64), sparse.csr_array((0, len(known)))
    return np.concatenate(holders), sparse.csr_array(sparse.vstack(parts))
