"""DSIR: importance of a chunk's hashed n-grams for the query against the corpus (Xie et al. 2023)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from stride_cli.data.query_set import query_texts
from stride_cli.errors import required
from stride_cli.research.methods.lexical import sparse_bytes
from stride_cli.research.methods.protocol import chunk_texts, query_blocks, require_text

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

    from stride_cli.data.query_set import QuerySet
    from stride_cli.data.workspace import Workspace

NGRAMS, BUCKETS = 2, 10_000  # data-selection's own
SMOOTHING = 1e-8  # added to every bucket's probability, as data-selection does


class DSIR:
    """Log importance weight of every chunk, with one query as the target distribution.

        score[q, i] = Σ_b counts[i, b] · (log p_q[b] − log p_corpus[b])

    over 10,000 buckets b of hashed words and pairs; p are relative frequencies, smoothed by 1e-8. Features
    are data-selection's own (`get_ngram_counts`); its formula is applied to all chunks and queries at once,
    where its estimator reads one target from a file. Chunks are ranked by the weight itself: nothing is
    resampled, and short chunks stay. As published, the sum is not divided by length.

    Raises
    ------
    UsageError            a workspace without text
    MissingExtraError     data-selection is not installed
    """

    name = "dsir"
    bytes_per_chunk = 0.0

    def fit(self, workspace: Workspace) -> None:
        require_text(workspace, self.name)
        self._task = workspace
        self._features = self._count(chunk_texts(workspace))  # (n, buckets)
        held = sparse_bytes(self._features)
        self.bytes_per_chunk = held / workspace.n_chunks if self._features.nnz else 0.0
        counts = np.asarray(self._features.sum(0), np.float64).ravel()
        self._log_corpus = np.log(counts / max(1.0, counts.sum()) + SMOOTHING)

    def score(self, queries: QuerySet) -> Iterator[np.ndarray]:
        for rows in query_blocks(queries):
            counts = self._count(query_texts(self._task, queries, rows)).toarray().astype(np.float64)
            totals = counts.sum(1, keepdims=True)
            ratio = np.log(counts / np.maximum(1, totals) + SMOOTHING) - self._log_corpus  # (q, buckets)
            ratio[totals[:, 0] == 0] = 0  # a query without words prefers nothing
            yield (self._features @ ratio.T).T.astype(np.float32, order="C")

    def _count(self, texts: Iterator[str] | list[str]) -> csr_matrix:
        """Hashed n-gram counts of texts, (texts, buckets) CSR int32."""
        from scipy.sparse import csr_matrix

        library = required("data_selection.hashed_ngram_dsir", "dsir", "data-selection")
        columns: list[np.ndarray] = []
        values: list[np.ndarray] = []
        for text in texts:
            counts = library.get_ngram_counts(text, n=NGRAMS, num_buckets=BUCKETS)
            columns.append(np.flatnonzero(counts).astype(np.int32))
            values.append(counts[columns[-1]].astype(np.int32))
        starts = np.concatenate([[0], np.cumsum([len(part) for part in columns])]).astype(np.int64)
        empty = np.empty(0, np.int32)
        return csr_matrix(
            (np.concatenate([empty, *values]), np.concatenate([empty, *columns]), starts),
            shape=(len(columns), BUCKETS),
        )
