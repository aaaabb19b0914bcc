"""What holds for every method that needs no truth: blocks, order, determinism, refusals."""

from __future__ import annotations

import numpy as np
import pytest

from stride_cli.data.query_set import QUERY_BLOCK
from stride_cli.errors import UsageError
from stride_cli.research.methods.registry import open_method
from tests.stride_cli.research.methods.gradients.scored import score_all

TEXT_METHODS = ["tfidf", "tfidf:units=tokens", "bm25", "dsir"]
ALL = ["chance", *TEXT_METHODS, "rds", "featsim", "tfidf:top=3"]


@pytest.mark.parametrize("spec", ALL)
@pytest.mark.parametrize("n_queries", [0, 1, 32, 33])
def test_blocks(spec, n_queries, task, make_queries, sentences) -> None:
    method = open_method(spec)
    method.fit(task)
    queries = make_queries(sentences[:n_queries])
    blocks = list(method.score(queries))
    assert [len(block) for block in blocks] == [
        min(QUERY_BLOCK, n_queries - start) for start in range(0, n_queries, QUERY_BLOCK)
    ]
    for block in blocks:
        assert block.dtype == np.float32
        assert block.shape[1] == task.n_chunks
        assert np.isfinite(block).all()
    assert method.bytes_per_chunk >= 0


@pytest.mark.parametrize("spec", ALL)
def test_order_and_grouping_do_not_matter(spec, task, make_queries, sentences) -> None:
    method = open_method(spec)
    method.fit(task)
    queries = make_queries(sentences[:34])
    order = np.random.default_rng(0).permutation(34)
    whole = score_all(method, queries)
    np.testing.assert_allclose(score_all(method, queries.take(order)), whole[order], rtol=1e-4, atol=1e-5)
    again = open_method(spec)
    again.fit(task)
    np.testing.assert_array_equal(score_all(again, queries), whole)


@pytest.mark.parametrize("spec", [spec for spec in ALL if spec != "chance"])
def test_the_same_text_comes_first(spec, task, make_queries, sentences) -> None:
    method = open_method(spec)
    method.fit(task)
    scores = score_all(method, make_queries(sentences))
    own = np.diagonal(scores)
    slack = 0.15 * scores.max(1) if spec == "bm25" else 1e-5  # BM25 favours chunks that repeat the words
    assert (own >= scores.max(1) - slack).all()
    assert (scores.argmax(1) == np.arange(len(sentences))).mean() >= 0.9


@pytest.mark.parametrize("spec", TEXT_METHODS)
def test_text_methods_refuse_classifiers(spec, make_task, sentences) -> None:
    task = make_task(sentences, kind="classifier")
    with pytest.raises(UsageError, match="classifier") as caught:
        open_method(spec).fit(task)
    assert spec.partition(":")[0] in caught.value.message


@pytest.mark.parametrize("spec", ["tfidf", "bm25", "dsir"])
def test_a_corpus_without_words_gives_zeros(spec, make_task, make_queries) -> None:
    task = make_task(["zz zz zz", "zz zz"])  # unknown tokens only: their text is empty
    method = open_method(spec)
    method.fit(task)
    np.testing.assert_array_equal(score_all(method, make_queries(["the river runs"])), np.zeros((1, 2)))
    assert method.bytes_per_chunk == 0


@pytest.mark.parametrize("spec", ALL)
def test_a_query_without_known_words(spec, task, make_queries) -> None:
    method = open_method(spec)
    method.fit(task)
    scores = score_all(method, make_queries(["zz zz zz"]))
    assert np.isfinite(scores).all()
    if spec in ("tfidf", "bm25", "dsir"):
        assert not scores.any()
