"""Find the n-grams of items in the corpus: the longest run an item shares, and what one chunk holds.

One pass over the corpus's tokens for all items together: a rolling hash of every n tokens is looked up in a
table of the items' n-grams, and each hit is compared token by token and extended to its full length.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from stride_cli.startup import compiled

if TYPE_CHECKING:
    from index_format.reader import Index

NGRAM = 8  # tokens, as in PaLM's decontamination (Chowdhery et al. 2022, section 8)
_THREE = 3
_BLOCK = 1 << 22  # tokens of the corpus read at a time


@dataclass(frozen=True)
class Overlap:
    """Words that an item shares with the corpus.

    Attributes
    ----------
    ngram : int      n: 8, or the length of the item's longest part where that is shorter; 0 without tokens
    longest : int    tokens of the longest run shared with one document; 0 where not even an n-gram is shared
    share : float    distinct positions of the item whose n-gram occurs somewhere in the corpus, 0 … 1
    token : int      where the longest run begins among the corpus's tokens; -1 where there is none
    """

    ngram: int
    longest: int
    share: float
    token: int


def find_overlaps(
    index: Index, items: Sequence[Sequence[np.ndarray]], *, ngram: int = NGRAM
) -> list[Overlap]:
    """Find the overlap of each item with all documents of an index.

    Parameters
    ----------
    items : of parts, each (L,) token ids; no n-gram spans two parts (prompt and response, say)
    ngram : int      n

    Returns
    -------
    list of Overlap, one an item; of runs equally long, the first in the corpus
    """
    lengths = [min(ngram, max((len(part) for part in parts), default=0)) for parts in items]
    found = [Overlap(0, 0, 0.0, -1)] * len(items)
    for n in sorted({length for length in lengths if length}):
        rows = [row for row, length in enumerate(lengths) if length == n]
        for row, overlap in zip(rows, _search(index, [items[row] for row in rows], n), strict=True):
            found[row] = overlap
    return found


def most_contained(index: Index, parts: Sequence[np.ndarray], chunks: np.ndarray) -> tuple[float, int]:
    """Find the largest share of an item's 3-grams that one chunk holds: its containment (Broder 1997).

    What an item shares with one document tells a version of it in other words, of which no long run is left,
    from an item of the same kind, whose n-grams are here and there in many documents.

    Parameters
    ----------
    parts : as `find_overlaps` takes them
    chunks : (c,) int64      those that are looked at

    Returns
    -------
    float      0 … 1; 0 where no part has three tokens
    int        the first chunk that holds so many; -1 where none holds any
    """
    own = np.unique(np.concatenate([_threes(part) for part in parts])) if len(parts) else np.zeros(0)
    if not len(own) or not len(chunks):
        return 0.0, -1
    held = [int(np.isin(own, _threes(index.chunk_tokens(int(chunk)))).sum()) for chunk in chunks]
    best = int(np.argmax(held))
    return held[best] / len(own), int(chunks[best]) if held[best] else -1


def _threes(tokens: np.ndarray) -> np.ndarray:
    """Write every 3-gram as one number, (L − 2,) uint64; token ids are below 2²¹."""
    ids = np.asarray(tokens, np.uint64)
    if len(ids) < _THREE:
        return np.zeros(0, np.uint64)
    return (ids[:-2] << np.uint64(42)) | (ids[1:-1] << np.uint64(21)) | ids[2:]


def _search(index: Index, items: Sequence[Sequence[np.ndarray]], n: int) -> list[Overlap]:
    parts = [(item, np.asarray(part, np.uint32)) for item, each in enumerate(items) for part in each]
    # 1. all parts one after the other; of every position its part's bounds and its item
    words = np.concatenate([part for _, part in parts])
    starts = np.concatenate([[0], np.cumsum([len(part) for _, part in parts])]).astype(np.int64)
    begin = np.repeat(starts[:-1], np.diff(starts))  # of the part that holds a position
    end = np.repeat(starts[1:], np.diff(starts))
    owner = np.repeat(np.array([item for item, _ in parts], np.int64), np.diff(starts))
    # 2. n-grams that lie within a part, in a table by hash
    grams = np.flatnonzero(np.arange(len(words)) + n <= end).astype(np.int64)  # where an n-gram begins
    hashes, table, following = _table_kernel(words, grams, n)
    # 3. one pass over the corpus
    seen = np.zeros(len(grams), np.uint8)
    longest = np.zeros(len(items), np.int64)
    place = np.full(len(items), -1, np.int64)
    for first, tokens, bounds in _documents(index):
        _scan_kernel(
            tokens, bounds, first, words, grams, begin, end, owner, n, hashes, table, following,
            seen, longest, place,
        )  # fmt: skip
    total = np.bincount(owner[grams], minlength=len(items))
    hits = np.bincount(owner[grams], weights=seen.astype(float), minlength=len(items))
    return [
        Overlap(n, int(run), float(hit / count), int(token))
        for run, hit, count, token in zip(longest, hits, total, place, strict=True)
    ]


def _documents(index: Index) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Yield whole documents, about `_BLOCK` tokens at a time: first token, tokens uint32, bounds from it."""
    tokens = index.array("corpus/tokens")
    chunk_offsets = np.asarray(index.array("corpus/chunk_offsets"))
    bounds = chunk_offsets[np.asarray(index.array("corpus/document_offsets"))].astype(np.int64)
    document, last = 0, len(bounds) - 1
    while document < last:
        stop = int(np.searchsorted(bounds, bounds[document] + _BLOCK, side="right")) - 1
        stop = min(last, max(document + 1, stop))
        first = int(bounds[document])
        yield (
            first,
            np.asarray(tokens[first : int(bounds[stop])], np.uint32),
            bounds[document : stop + 1] - first,
        )
        document = stop


@compiled
def _table_kernel(words, grams, n):
    """Hash the n-grams; make a table of their numbers (open addressing), and chains of equal hashes."""
    base = np.uint64(0x9E3779B97F4A7C15)
    size = 1024
    while size < 4 * len(grams):
        size *= 2
    table = np.full(size, -1, np.int64)
    following = np.full(len(grams), -1, np.int64)
    hashes = np.zeros(len(grams), np.uint64)
    for gram in range(len(grams)):
        value = np.uint64(0)
        for offset in range(n):
            value = value * base + np.uint64(words[grams[gram] + offset]) + np.uint64(1)
        hashes[gram] = value
        slot = np.int64((value ^ (value >> np.uint64(29))) & np.uint64(size - 1))
        while table[slot] >= 0 and hashes[table[slot]] != value:
            slot = (slot + 1) & (size - 1)
        following[gram] = table[slot]
        table[slot] = gram
    return hashes, table, following


@compiled
def _scan_kernel(
    tokens, bounds, first, words, grams, begin, end, owner, n, hashes, table, following, seen, longest, place
):
    """Scan one block of documents: mark `seen` n-grams, raises `longest` and `place` of their items."""
    base = np.uint64(0x9E3779B97F4A7C15)
    power = np.uint64(1)
    for _ in range(n):
        power *= base
    size = len(table)
    for document in range(len(bounds) - 1):
        low, high = bounds[document], bounds[document + 1]
        value = np.uint64(0)
        for position in range(low, high):
            # the hash of the last n tokens: take one in, and the one before them out
            value = value * base + np.uint64(tokens[position]) + np.uint64(1)
            start = position - n + 1
            if start < low:
                continue
            if start > low:
                value -= power * (np.uint64(tokens[start - 1]) + np.uint64(1))
            slot = np.int64((value ^ (value >> np.uint64(29))) & np.uint64(size - 1))
            while table[slot] >= 0 and hashes[table[slot]] != value:
                slot = (slot + 1) & (size - 1)
            # every n-gram of the items with this hash is compared token by token
            gram = table[slot]
            while gram >= 0:
                at = grams[gram]
                same = True
                for offset in range(n):
                    if words[at + offset] != tokens[start + offset]:
                        same = False
                        break
                if same:
                    seen[gram] = 1
                    # where the token before matches too, this run was measured from its beginning
                    if start == low or at == begin[at] or words[at - 1] != tokens[start - 1]:
                        length = n
                        while (
                            at + length < end[at]
                            and start + length < high
                            and words[at + length] == tokens[start + length]
                        ):
                            length += 1
                        item = owner[at]
                        if length > longest[item]:
                            longest[item] = length
                            place[item] = first + start
                gram = following[gram]
