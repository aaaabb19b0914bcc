"""Scores of documents by the tokens of their best chunk, against bm25s."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from stride_cli.data.query_set import QuerySet
from stride_cli.research.selection.select import _bm25_rows


def test_as_bm25s() -> None:
    bm25s = pytest.importorskip("bm25s")
    generator = np.random.default_rng(0)
    chunks = [generator.zipf(1.5, size).clip(1, 60).tolist() for size in generator.integers(5, 40, 50)]
    reference = bm25s.BM25(method="lucene", k1=1.5, b=0.75)
    vocabulary = {str(token): token for token in range(61)}
    reference.index((chunks, vocabulary), show_progress=False, create_empty_token=False)
    arrays = {
        "corpus/tokens": np.concatenate(chunks).astype(np.uint16),
        "corpus/chunk_offsets": np.cumsum([0, *map(len, chunks)]),
    }
    index: Any = SimpleNamespace(n_documents=25, array=arrays.__getitem__)
    ids = [np.array([1, 1, 2, 7, 7, 30, 60]), np.array([70, 70])]
    queries = QuerySet(ids, [np.ones(len(each), np.float32) for each in ids], ["a", "b"])
    first, second = _bm25_rows(index, np.arange(50) // 2, queries)
    expected = reference.get_scores_from_ids(ids[0].tolist()).reshape(25, 2).max(axis=1)
    np.testing.assert_allclose(first, expected, rtol=1e-5)
    assert not second.any()
