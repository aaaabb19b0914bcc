"""TF-IDF against scikit-learn used directly, BM25 against its formula."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.metrics.pairwise import cosine_similarity

from stride_cli.research.methods import lexical
from stride_cli.research.methods.lexical import BM25, SharedPairs, TfIdf
from tests.stride_cli.research.methods.gradients.scored import score_all


@pytest.mark.parametrize("ngrams", [1, 2])
def test_tfidf_is_scikit_learns(ngrams, task, make_queries, sentences, monkeypatch) -> None:
    monkeypatch.setattr(lexical, "SIMILARITY_CHUNKS", 7)  # several blocks of chunks
    method = TfIdf(ngrams=ngrams)
    method.fit(task)
    wanted = sentences[:40]
    direct = TfidfVectorizer(ngram_range=(1, ngrams), max_features=50_000, sublinear_tf=True)
    corpus = direct.fit_transform(sentences)
    expected = cosine_similarity(direct.transform(wanted), corpus)
    np.testing.assert_allclose(score_all(method, make_queries(wanted)), expected, atol=1e-6)
    held = 8 * corpus.nnz + 4 * (corpus.shape[0] + 1)  # float32 values and int32 columns, row starts
    assert method.bytes_per_chunk == pytest.approx(held / len(sentences))


def test_shared_pairs_count_by_how_rare_they_are(task, make_queries, sentences) -> None:
    method = SharedPairs()
    method.fit(task)
    queries = make_queries([*sentences[:6], "snow wolves snow wolves"])
    corpus = [list(pairwise(task.chunks.chunk(row)[0].tolist())) for row in range(task.n_chunks)]
    total = Counter(pair for pairs in corpus for pair in pairs)
    expected = np.zeros((len(queries), task.n_chunks))
    for number, ids in enumerate(queries.ids):
        for pair in pairwise(ids.tolist()):
            for row, pairs in enumerate(corpus):
                expected[number, row] += pairs.count(pair) / (total[pair] + 1)
    found = score_all(method, queries)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert (found[:6].argmax(axis=1) == np.arange(6)).mean() > 0.5


def bm25_by_hand(query: str, corpus: list[str], k1: float = 1.5, b: float = 0.75) -> list[float]:
    documents = [text.split() for text in corpus]
    n_documents = len(documents)
    mean = sum(map(len, documents)) / n_documents
    scores = []
    for document in documents:
        total = 0.0
        for word in query.split():
            containing = sum(word in other for other in documents)
            if containing:
                idf = math.log(1 + (n_documents - containing + 0.5) / (containing + 0.5))
                count = document.count(word)
                total += idf * count / (count + k1 * (1 - b + b * len(document) / mean))
        scores.append(total)
    return scores


def test_bm25_is_its_formula(make_task, make_queries) -> None:
    corpus = ["the river runs north", "river river mill", "old stone mill and old bread", "snow"]
    wanted = ["river mill", "old bread old", "pines wolves", "snow snow"]
    method = BM25()
    method.fit(make_task(corpus))
    expected = [bm25_by_hand(query, corpus) for query in wanted]
    np.testing.assert_allclose(score_all(method, make_queries(wanted)), expected, rtol=1e-5)
