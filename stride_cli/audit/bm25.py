"""Score all chunks against items by BM25 over token ids: two passes over the corpus, block after block.

The score of a chunk is the sum over the item's tokens, each as often as it occurs there, of

    idf · tf / (tf + k1 (1 − b + b length / mean length)),  idf = ln(1 + (n − df + ½) / (df + ½)):

Lucene's form (Kamphuis et al. 2020), as `research.methods.lexical.BM25` has it over words. Postings are
made for the items' tokens only and for one block of chunks at a time, so that memory does not grow with the
corpus.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from stride_cli.startup import compiled

if TYPE_CHECKING:
    from index_format.reader import Index

_K1, _B = 1.5, 0.75
_BLOCK_CHUNKS = 1 << 15
_BLOCK_TOKENS = 1 << 22


@dataclass(frozen=True)
class Ranked:
    """Chunks most like an item.

    Attributes
    ----------
    chunks : (c,) int64      by falling score, equal ones by number; only chunks that share a token with it
    scores : (c,) float64
    own : float              the score that a chunk of the item's tokens and no others would have
    """

    chunks: np.ndarray
    scores: np.ndarray
    own: float

    @property
    def likeness(self) -> np.ndarray:
        """Scores / own, at most 1: about 1 for a copy. (c,) float64"""
        return np.minimum(self.scores / self.own, 1.0) if self.own else np.zeros(len(self.scores))


def best_chunks(index: Index, items: Sequence[np.ndarray], top: int) -> list[Ranked]:
    """Find the chunks of highest BM25 score for each item.

    Parameters
    ----------
    items : of (L,) token ids
    top : int      most chunks an item

    Returns
    -------
    list of Ranked, one an item
    """
    wanted = np.unique(np.concatenate([np.zeros(0, np.int64), *items])).astype(np.int64)
    terms = [np.unique(np.asarray(item, np.int64), return_counts=True) for item in items]
    n_chunks = index.n_chunks
    if not len(wanted) or not n_chunks:
        return [Ranked(np.zeros(0, np.int64), np.zeros(0), 0.0) for _ in items]
    # 1. one pass: in how many chunks each of the items' tokens occurs
    number = np.full(int(max(wanted[-1], _largest(index))) + 1, -1, np.int64)  # token id → term
    number[wanted] = np.arange(len(wanted))
    frequency = np.zeros(len(wanted), np.int64)
    for _, tokens, bounds in _chunks(index):
        terms_found, _, _ = _postings_kernel(tokens, bounds, number, len(wanted))
        frequency += np.diff(terms_found)
    idf = np.log1p((n_chunks - frequency + 0.5) / (frequency + 0.5))
    mean_length = max(1.0, index.n_tokens / n_chunks)
    # 2. a second pass: scores of a block of chunks, of which the best of each item are kept
    chunks = [np.zeros(0, np.int64) for _ in items]
    scores = [np.zeros(0) for _ in items]
    for first, tokens, bounds in _chunks(index):
        offsets, rows, counts = _postings_kernel(tokens, bounds, number, len(wanted))
        norm = _K1 * (1 - _B + _B * np.diff(bounds) / mean_length)
        total = np.zeros(len(norm))
        for item, (ids, times) in enumerate(terms):
            total[:] = 0
            _score_kernel(number[ids], times * idf[number[ids]], offsets, rows, counts, norm, total)
            found = np.flatnonzero(total)
            if len(found) > top:
                limit = np.partition(total[found], len(found) - top)[len(found) - top]
                found = found[total[found] >= limit]
            merged = np.concatenate([scores[item], total[found]])
            numbers = np.concatenate([chunks[item], found + first])
            order = np.argsort(-merged, kind="stable")[:top]
            scores[item], chunks[item] = merged[order], numbers[order]
    # 3. what a chunk of an item's own tokens would have
    own = []
    for ids, times in terms:
        norm_of_item = _K1 * (1 - _B + _B * times.sum() / mean_length)
        own.append(float((times * idf[number[ids]] * times / (times + norm_of_item)).sum()))
    return [Ranked(*found) for found in zip(chunks, scores, own, strict=True)]


def _largest(index: Index) -> int:
    return max((int(tokens.max(initial=0)) for _, tokens, _ in _chunks(index)), default=0)


def _chunks(index: Index) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Yield blocks of chunks: first chunk, tokens uint32, bounds of the chunks in them."""
    tokens = index.array("corpus/tokens")
    offsets = np.asarray(index.array("corpus/chunk_offsets")).astype(np.int64)
    first, last = 0, len(offsets) - 1
    while first < last:
        stop = int(np.searchsorted(offsets, offsets[first] + _BLOCK_TOKENS, side="right")) - 1
        stop = min(last, first + _BLOCK_CHUNKS, max(first + 1, stop))
        low, high = int(offsets[first]), int(offsets[stop])
        yield first, np.asarray(tokens[low:high], np.uint32), offsets[first : stop + 1] - low
        first = stop


@compiled
def _postings_kernel(tokens, bounds, number, n_terms):
    """List the chunks that hold each term, ascending, and how often: offsets (n_terms + 1,), rows, counts."""
    n_rows = len(bounds) - 1
    last = np.full(n_terms, -1, np.int64)
    offsets = np.zeros(n_terms + 1, np.int64)
    for row in range(n_rows):
        for position in range(bounds[row], bounds[row + 1]):
            term = number[tokens[position]]
            if term >= 0 and last[term] != row:
                last[term] = row
                offsets[term + 1] += 1
    for term in range(n_terms):
        offsets[term + 1] += offsets[term]
    rows = np.zeros(offsets[n_terms], np.int64)
    counts = np.zeros(offsets[n_terms], np.int64)
    at = offsets[:-1].copy() - 1
    last[:] = -1
    for row in range(n_rows):
        for position in range(bounds[row], bounds[row + 1]):
            term = number[tokens[position]]
            if term < 0:
                continue
            if last[term] != row:
                last[term] = row
                at[term] += 1
                rows[at[term]] = row
            counts[at[term]] += 1
    return offsets, rows, counts


@compiled
def _score_kernel(terms, weights, offsets, rows, counts, norm, total):
    """Add each term's part to `total` (n_rows,)."""
    for position in range(len(terms)):
        term, weight = terms[position], weights[position]
        for at in range(offsets[term], offsets[term + 1]):
            total[rows[at]] += weight * counts[at] / (counts[at] + norm[rows[at]])
