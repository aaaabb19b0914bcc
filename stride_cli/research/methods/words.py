"""What chunks share with a query as text: TF-IDF, and pairs of neighbouring tokens. They know no model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from stride_cli.attribution.shared_pairs import shared_pairs
from stride_cli.data.query_set import QUERY_BLOCK
from stride_cli.data.texts import chunk_texts, query_texts, require_text
from stride_cli.errors import UsageError, require_extra

if TYPE_CHECKING:
    from stride_cli.data.query_set import QuerySet
    from stride_cli.data.workspace import Workspace

SIMILARITY_CHUNKS = 25_000  # chunks compared with a block of queries at once (app:baseline_details)
UNITS = ("words", "tokens")


class TfIdf:
    """Cosine of TF-IDF vectors, by scikit-learn's `TfidfVectorizer` (app:baseline_details).

    Sublinear term frequency, l2 normalisation, the 50,000 most frequent n-grams; the vocabulary and the
    document frequencies are the corpus's. Fitting holds the counts of all n-grams of the corpus at once,
    12 bytes each; scoring takes 25,000 chunks at a time.

    Parameters
    ----------
    ngrams : int          1 for words, 2 for words and pairs (the paper: 2 in pre-training, 1 in fine-tuning)
    units : str           "words", or "tokens" of the model's tokenizer
    max_features : int    most n-grams kept, by frequency in the corpus

    Raises
    ------
    UsageError            an option out of range, or a workspace without text
    MissingExtraError     scikit-learn is not installed
    """

    name = "tfidf"
    bytes_per_chunk = 0.0

    def __init__(self, *, ngrams: int = 2, units: str = "words", max_features: int = 50_000) -> None:
        if ngrams < 1 or max_features < 1:
            raise UsageError(f"tfidf: ngrams and max_features start at 1, found {ngrams} and {max_features}")
        if units not in UNITS:
            raise UsageError(f"tfidf: units should be {' or '.join(UNITS)}, found '{units}'")
        self.ngrams = ngrams
        self.units = units
        self.max_features = max_features

    def fit(self, workspace: Workspace) -> None:
        require_text(workspace, self.name)
        try:
            from sklearn.feature_extraction.text import TfidfVectorizer
        except ModuleNotFoundError as error:
            raise require_extra("scikit-learn", "baselines") from error
        self._task = workspace
        settings: dict[str, Any] = {}
        if self.units == "tokens":
            # sequences of token numbers: split at spaces, nothing left out
            settings = {"tokenizer": str.split, "token_pattern": None, "lowercase": False}
        vectorizer = TfidfVectorizer(
            ngram_range=(1, self.ngrams),
            max_features=self.max_features,
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
        self.bytes_per_chunk = _sparse_bytes(self._vectors) / workspace.n_chunks

    def score(self, queries: QuerySet) -> Iterator[np.ndarray]:
        n_chunks = self._task.n_chunks
        for start in range(0, len(queries), QUERY_BLOCK):
            rows = range(start, min(start + QUERY_BLOCK, len(queries)))
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

    def _queries(self, queries: QuerySet, rows: range) -> list[str]:
        if self.units == "words":
            return query_texts(self._task, queries, rows)
        return [_numbers(queries.ids[row]) for row in rows]


class SharedPairs:
    """Pairs of neighbouring tokens that a chunk shares with the query, each by how rare it is: see
    `stride_cli.attribution.shared_pairs`. No model takes part.

    Parameters
    ----------
    smoothing : float      0 or more

    Raises
    ------
    UsageError            an option out of range, or a workspace without text
    """

    name = "pairs"
    bytes_per_chunk = 0.0

    def __init__(self, *, smoothing: float = 1.0) -> None:
        if smoothing < 0:
            raise UsageError(f"pairs: smoothing should be 0 or more, found {smoothing:g}")
        self.smoothing = smoothing

    def fit(self, workspace: Workspace) -> None:
        require_text(workspace, self.name)
        self._task = workspace

    def score(self, queries: QuerySet) -> Iterator[np.ndarray]:
        base = self._task.model.vocab_size
        for first in range(0, len(queries), QUERY_BLOCK):
            asked = queries.take(range(first, min(first + QUERY_BLOCK, len(queries))))
            yield shared_pairs(asked, self._task.chunks, base, smoothing=self.smoothing)


def _numbers(tokens: np.ndarray) -> str:
    return " ".join(map(str, np.asarray(tokens).tolist()))


def _sparse_bytes(matrix: Any) -> int:
    return int(matrix.data.nbytes + matrix.indices.nbytes + matrix.indptr.nbytes)
