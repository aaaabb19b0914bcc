"""Text overlap of chunks with a query, without a model: BM25, TF-IDF, pairs of neighbouring tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from stride_cli.attribution.shared_pairs import pair_scores
from stride_cli.characters import words
from stride_cli.data.query_set import query_texts
from stride_cli.errors import UsageError, required
from stride_cli.research.methods.protocol import chunk_texts, query_blocks, require_text

if TYPE_CHECKING:
    from stride_cli.data.batches import ChunkReader
    from stride_cli.data.query_set import QuerySet
    from stride_cli.data.workspace import Workspace

SIMILARITY_CHUNKS = 25_000  # chunks compared with a block of queries at once (app:baseline_details)
UNITS = ("words", "tokens")


class BM25:
    """BM25 by `bm25s`, every term of the query counted as often as it occurs.

    The score of a chunk is the sum over the query's terms of

        idf · tf / (tf + k1 (1 − b + b length / mean length)),  idf = ln(1 + (n − df + ½) / (df + ½)):

    Lucene's form (Kamphuis et al. 2020), bm25s's default. Words are lowercased, of two characters or more,
    neither stemmed nor filtered by a stop list (of scripts without spaces, each two neighbours); k1 = 1.5,
    b = 0.75.

    Raises
    ------
    UsageError            a workspace without text
    MissingExtraError     bm25s is not installed
    """

    name = "bm25"
    bytes_per_chunk = 0.0

    def fit(self, workspace: Workspace) -> None:
        require_text(workspace, self.name)
        bm25s = required("bm25s", "baselines")
        self._task = workspace
        # numbered in order of appearance: bm25s would number a set, in an order that changes with every run
        self._vocabulary: dict[str, int] = {}
        chunks = [
            [self._vocabulary.setdefault(word, len(self._vocabulary)) for word in words(text.lower())]
            for text in chunk_texts(workspace)
        ]
        self._index = None
        if self._vocabulary:
            self._index = bm25s.BM25(method="lucene", k1=1.5, b=0.75)
            self._index.index((chunks, self._vocabulary), show_progress=False, create_empty_token=False)
            held = sum(self._index.scores[part].nbytes for part in ("data", "indices", "indptr"))
            self.bytes_per_chunk = held / workspace.n_chunks

    def score(self, queries: QuerySet) -> Iterator[np.ndarray]:
        for rows in query_blocks(queries):
            block = np.zeros((len(rows), self._task.n_chunks), np.float32)
            for position, text in enumerate(query_texts(self._task, queries, rows)):
                known = [self._vocabulary[word] for word in words(text.lower()) if word in self._vocabulary]
                if self._index is not None and known:
                    block[position] = self._index.get_scores_from_ids(known)
            yield block


class TfIdf:
    """Cosine of TF-IDF vectors, by scikit-learn's `TfidfVectorizer` (app:baseline_details).

    Sublinear term frequency, l2 normalisation, the 50,000 most frequent n-grams; vocabulary and document
    frequencies are the corpus's. Fitting holds the counts of all n-grams of the corpus, 12 bytes each.

    Parameters
    ----------
    ngrams : int          1 for words, 2 for words and pairs (the paper: 2 in pre-training, 1 in fine-tuning)
    units : str           "words", or "tokens" of the model's tokenizer

    Raises
    ------
    UsageError            an option out of range, or a workspace without text
    MissingExtraError     scikit-learn is not installed
    """

    name = "tfidf"
    bytes_per_chunk = 0.0

    def __init__(self, *, ngrams: int = 2, units: str = "words") -> None:
        if ngrams < 1:
            raise UsageError(f"tfidf: ngrams starts at 1, found {ngrams}")
        if units not in UNITS:
            raise UsageError(f"tfidf: units should be {' or '.join(UNITS)}, found '{units}'")
        self.ngrams, self.units = ngrams, units

    def fit(self, workspace: Workspace) -> None:
        require_text(workspace, self.name)
        text = required("sklearn.feature_extraction.text", "baselines", "scikit-learn")
        self._task = workspace
        settings: dict[str, Any] = {"tokenizer": words, "token_pattern": None}
        if self.units == "tokens":  # texts are token numbers, split at spaces
            settings |= {"tokenizer": str.split, "lowercase": False}
        vectorizer = text.TfidfVectorizer(
            ngram_range=(1, self.ngrams),
            max_features=50_000,
            sublinear_tf=True,
            norm="l2",
            dtype=np.float32,
            **settings,
        )
        self._vectorizer = self._vectors = None
        if not workspace.n_chunks:
            return
        try:
            self._vectors = vectorizer.fit_transform(self._chunks(workspace))  # (n, features) CSR
        except ValueError as error:
            if "empty vocabulary" not in str(error):
                raise
            return  # no chunk has a word: nothing overlaps with anything
        self._vectorizer = vectorizer
        self.bytes_per_chunk = sparse_bytes(self._vectors) / workspace.n_chunks

    def score(self, queries: QuerySet) -> Iterator[np.ndarray]:
        n_chunks = self._task.n_chunks
        for rows in query_blocks(queries):
            block = np.zeros((len(rows), n_chunks), np.float32)
            if self._vectorizer is not None and self._vectors is not None:
                wanted = self._vectorizer.transform(self._queries(queries, rows)).T.tocsc()  # (features, q)
                for first in range(0, n_chunks, SIMILARITY_CHUNKS):
                    part = self._vectors[first : first + SIMILARITY_CHUNKS] @ wanted
                    block[:, first : first + part.shape[0]] = part.toarray().T
            yield block

    def _chunks(self, workspace: Workspace) -> Iterator[str]:
        if self.units == "words":
            return chunk_texts(workspace)
        return (_numbers(workspace.chunks.chunk(row)[0]) for row in range(workspace.n_chunks))

    def _queries(self, queries: QuerySet, rows: np.ndarray) -> list[str]:
        if self.units == "words":
            return query_texts(self._task, queries, rows)
        return [_numbers(queries.ids[row]) for row in rows]


class SharedPairs:
    """Pairs of neighbouring tokens that a chunk shares with the query, weighted by their rarity.

    See `stride_cli.attribution.shared_pairs`. No model takes part.

    Raises
    ------
    UsageError            a workspace without text
    """

    name = "pairs"
    bytes_per_chunk = 0.0

    def fit(self, workspace: Workspace) -> None:
        require_text(workspace, self.name)
        self._task = workspace

    def score(self, queries: QuerySet) -> Iterator[np.ndarray]:
        base = self._task.model.vocab_size
        for rows in query_blocks(queries):
            yield shared_pairs(queries.take(rows), self._task.chunks, base)


def sparse_bytes(matrix: Any) -> int:
    """Count the bytes of a CSR matrix."""
    return int(matrix.data.nbytes + matrix.indices.nbytes + matrix.indptr.nbytes)


def _numbers(tokens: np.ndarray) -> str:
    return " ".join(map(str, np.asarray(tokens).tolist()))


def shared_pairs(queries: QuerySet, chunks: ChunkReader, vocab_size: int) -> np.ndarray:
    """All of `pair_scores`, (Q, n) float32 ≥ 0."""
    found = pair_scores(queries, chunks, vocab_size)
    scores = np.zeros((len(queries.ids), chunks.n_chunks), np.float32)
    for number, row in enumerate(scores):
        own = found.of(number)
        row[own.chunks] = own.scores
    return scores
