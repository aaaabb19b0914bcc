"""Pairs of neighbouring tokens that chunks share with a query: what a model of nothing but bigrams would say.

Small language models learn such pairs first, and a rare one from the few chunks that hold it. No model takes
part, and nothing is stored: the corpus is read once for all queries together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stride_cli.data.batches import scored_pairs

if TYPE_CHECKING:
    from scipy import sparse

    from stride_cli.data.batches import ChunkReader
    from stride_cli.data.query_set import QuerySet

_TOKENS = 1 << 20  # of the corpus read at once


def shared_pairs(
    queries: QuerySet, chunks: ChunkReader, vocab_size: int, *, smoothing: float = 1.0
) -> np.ndarray:
    """How much every chunk shares with every query:

        score_i = Σ_g  count_g(query) · count_g(i) / (count_g(corpus) + smoothing),

    over pairs g of a token and the scored one right after it. To first order, what a maximum-likelihood model
    of bigrams would answer when a chunk is taken away.

    Parameters
    ----------
    queries : Q sequences of token ids
    chunks : the n chunks, in the same vocabulary
    vocab_size : V
    smoothing : float ≥ 0

    Returns
    -------
    ndarray (Q, n) float32 ≥ 0
    """
    from scipy import sparse

    asked = [
        scored_pairs(ids, weights, vocab_size)
        for ids, weights in zip(queries.ids, queries.weights, strict=True)
    ]
    known, column = np.unique(np.concatenate(asked), return_inverse=True)  # (G,), ascending
    row = np.repeat(np.arange(len(asked)), [len(pairs) for pairs in asked])
    wanted = sparse.csr_array((np.ones(len(row)), (row, column)), (len(asked), len(known)))
    held = _occurrences(chunks, known, vocab_size)
    total = held.sum(axis=0)
    rarity = np.divide(1.0, total + smoothing, out=np.zeros(len(known)), where=total > 0)
    scores: np.ndarray = (wanted.multiply(rarity).tocsr() @ held.T).toarray().astype(np.float32)
    return scores


def _occurrences(chunks: ChunkReader, known: np.ndarray, vocab_size: int) -> sparse.csr_array:
    """How often each chunk holds each of these pairs, (n, G) float64."""
    from scipy import sparse

    offsets = np.asarray(chunks.offsets, np.int64)
    begins, ends = np.zeros((2, vocab_size), bool)  # whether a token begins or ends any pair: most do not
    begins[known // vocab_size] = True
    ends[known % vocab_size] = True
    parts = []
    first = 0
    while first < chunks.n_chunks:
        stop = int(np.searchsorted(offsets, offsets[first] + _TOKENS, side="right")) - 1
        stop = min(max(stop, first + 1), chunks.n_chunks)
        start, end = int(offsets[first]), int(offsets[stop])
        tokens = chunks.span(start, end)
        places = np.flatnonzero(begins[tokens[:-1]] & ends[tokens[1:]])
        pairs = tokens[places].astype(np.int64) * vocab_size + tokens[places + 1]
        at = np.minimum(np.searchsorted(known, pairs), len(known) - 1)
        found = known[at] == pairs
        places, at = places[found] + 1 + start, at[found]  # where the second token is
        rows = np.searchsorted(offsets, places, side="right") - 1
        # a chunk's first token is not scored: no pair reaches across
        scored = places - offsets[rows] >= np.maximum(1, chunks.loss_start[rows])
        if chunks.loss_mask is not None:
            scored &= np.asarray(chunks.loss_mask[start:end])[places - start] > 0
        rows, at = rows[scored] - first, at[scored]
        shape = (stop - first, len(known))
        parts.append(sparse.csr_array((np.ones(len(rows)), (rows, at)), shape))
        first = stop
    held = sparse.vstack(parts) if parts else np.zeros((0, len(known)))
    counts: sparse.csr_array = sparse.csr_array(held)
    return counts
