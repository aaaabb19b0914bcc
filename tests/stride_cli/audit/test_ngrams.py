"""Overlaps against looking at every pair of positions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stride_cli.audit import ngrams
from stride_cli.audit.ngrams import Overlap, find_overlaps, most_contained

TOKEN = st.integers(0, 2)
TEXT = st.lists(TOKEN, max_size=24)


def brute_force(documents: list[list[int]], parts: list[list[int]], n: int) -> Overlap:
    n = min(n, max((len(part) for part in parts), default=0))
    if not n:
        return Overlap(0, 0, 0.0, -1)
    known = {tuple(text[at : at + n]) for text in documents for at in range(len(text) - n + 1)}
    grams = [tuple(part[at : at + n]) for part in parts for at in range(len(part) - n + 1)]
    longest, place, first = 0, -1, 0
    for text in documents:
        for start in range(len(text)):
            for part in parts:
                for at in range(len(part)):
                    length = 0
                    while (
                        at + length < len(part)
                        and start + length < len(text)
                        and part[at + length] == text[start + length]
                    ):
                        length += 1
                    if length >= n and length > longest:
                        longest, place = length, first + start
        first += len(text)
    return Overlap(n, longest, sum(gram in known for gram in grams) / len(grams), place)


@given(
    documents=st.lists(TEXT.filter(bool), min_size=1, max_size=5),
    items=st.lists(st.lists(TEXT, min_size=1, max_size=2), max_size=4),
    n=st.integers(1, 5),
    block_size=st.integers(2, 9),
)
@settings(max_examples=150, deadline=None)
def test_as_brute_force(token_index, documents, items, n, block_size) -> None:
    arrays = [[np.array(part, np.int64) for part in parts] for parts in items]
    found = find_overlaps(token_index(documents, block_size), arrays, ngram=n)
    assert found == [brute_force(documents, parts, n) for parts in items]


def test_in_small_blocks(token_index, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.default_rng(0)
    documents = [generator.integers(0, 50_000, size).tolist() for size in (30, 7, 45, 12, 90)]
    items = [[np.array(documents[4][10:60])], [np.array(documents[1]), np.array([1, 2, 3])]]
    index = token_index(documents, 16)
    whole = find_overlaps(index, items)
    assert whole[0].longest == 50 and whole[0].share == 1.0 and whole[0].token == sum((30, 7, 45, 12)) + 10
    assert whole[1] == Overlap(7, 7, 1.0, 30)
    monkeypatch.setattr(ngrams, "_BLOCK", 20)
    assert find_overlaps(index, items) == whole


@given(
    documents=st.lists(TEXT.filter(bool), min_size=1, max_size=4),
    parts=st.lists(TEXT, max_size=2),
    block_size=st.integers(2, 9),
)
@settings(max_examples=100, deadline=None)
def test_what_one_chunk_holds(token_index, documents, parts, block_size) -> None:
    def threes(text: list[int]) -> set[tuple[int, ...]]:
        return {tuple(text[at : at + 3]) for at in range(len(text) - 2)}

    chunks = [text[at : at + block_size] for text in documents for at in range(0, len(text), block_size)]
    own = {three for part in parts for three in threes(part)}
    held = [len(own & threes(chunk)) / len(own) if own else 0.0 for chunk in chunks]
    arrays = [np.array(part, np.int64) for part in parts]
    index = token_index(documents, block_size)
    every = np.arange(len(chunks))
    found = max(held), held.index(max(held)) if max(held) else -1
    assert most_contained(index, arrays, every) == pytest.approx(found)
    assert most_contained(index, arrays, every[:1])[0] == pytest.approx(held[0])
    assert most_contained(index, arrays, every[:0]) == (0, -1)


def test_the_same_form_is_not_other_words(token_index) -> None:
    """A version with other names is mostly in one chunk; a text of the same phrases is spread over many."""
    generator = np.random.default_rng(3)
    phrases = generator.integers(0, 60_000, (40, 5))
    texts = [phrases[generator.permutation(40)[:8]].ravel() for _ in range(60)]
    version = texts[7].copy()
    version[[2, 13, 21, 34]] = 60_001
    index = token_index([text.tolist() for text in texts], 64)
    alike = phrases[generator.permutation(40)[:8]].ravel()
    every = np.arange(60)
    assert find_overlaps(index, [[version]])[0].share < 0.7
    assert (
        most_contained(index, [version], every)[0] > 0.6 and most_contained(index, [version], every)[1] == 7
    )
    assert most_contained(index, [alike], every)[0] < 0.5
