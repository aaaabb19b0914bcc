"""Scores of tokens against bm25s, and blocks against the whole."""

from __future__ import annotations

import numpy as np
import pytest

from stride_cli.audit import bm25
from stride_cli.audit.bm25 import best_chunks


def corpus(seed: int = 0) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    return [generator.zipf(1.5, size).clip(1, 60).tolist() for size in generator.integers(5, 40, 50)]


def test_as_bm25s(token_index) -> None:
    bm25s = pytest.importorskip("bm25s")
    documents = corpus()
    index = token_index(documents, 100)
    reference = bm25s.BM25(method="lucene", k1=1.5, b=0.75)
    vocabulary = {str(token): token for token in range(61)}
    reference.index((documents, vocabulary), show_progress=False, create_empty_token=False)
    item = np.array([1, 1, 2, 7, 7, 30, 60])
    found = best_chunks(index, [item], 10)[0]
    chunks, scores = found.chunks, found.scores
    expected = reference.get_scores_from_ids(item.tolist())
    np.testing.assert_allclose(scores, np.sort(expected)[::-1][:10], rtol=1e-5)
    np.testing.assert_allclose(expected[chunks], scores, rtol=1e-5)


def test_blocks_give_the_same(token_index, monkeypatch: pytest.MonkeyPatch) -> None:
    index = token_index(corpus(1), 16)
    items = [np.array([3, 9, 9]), np.array([], np.int64), np.array([61]), np.array([2])]
    whole = best_chunks(index, items, 5)
    monkeypatch.setattr(bm25, "_BLOCK_CHUNKS", 3)
    parts = best_chunks(index, items, 5)
    for one, other in zip(whole, parts, strict=True):
        np.testing.assert_array_equal(one.chunks, other.chunks)
        np.testing.assert_array_equal(one.scores, other.scores)
        assert one.own == other.own
    assert len(whole[1].chunks) == len(whole[2].chunks) == 0
    assert len(whole[0].chunks) == 5 and (np.diff(whole[0].scores) <= 0).all()


def test_a_copy_is_like_the_item(token_index) -> None:
    """The item's own score is what a chunk of its tokens gets: likeness 1; others share less."""
    documents = corpus(2)
    row = max(range(len(documents)), key=lambda number: len(set(documents[number])))
    found = best_chunks(token_index(documents, 100), [np.array(documents[row]), np.array([], np.int64)], 50)
    like = found[0]
    assert like.chunks[0] == row and like.own == pytest.approx(like.scores[0], rel=1e-12)
    assert like.likeness[0] > 1 - 1e-12 and 0 < like.likeness.min() < np.median(like.likeness) < 0.9
    assert found[1].own == 0 and len(found[1].likeness) == 0
