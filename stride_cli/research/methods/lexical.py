"""Word overlap: BM25, beside the TF-IDF and the shared pairs that influences can be combined with."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from stride_cli.data.query_set import QUERY_BLOCK
from stride_cli.data.texts import chunk_texts, query_texts, require_text
from stride_cli.errors import UsageError, require_extra
from stride_cli.research.methods.words import SharedPairs, TfIdf

if TYPE_CHECKING:
    from stride_cli.data.query_set import QuerySet
    from stride_cli.data.workspace import Workspace

__all__ = ["BM25", "SharedPairs", "TfIdf"]
_WORD = re.compile(r"(?u)\b\w\w+\b")  # words of two characters or more: scikit-learn's and bm25s's own rule


class BM25:
    """BM25 by `bm25s`, every term of the query counted as often as it occurs.

    The score of a chunk is the sum over the query's terms of

        idf · tf / (tf + k1 (1 − b + b length / mean length)),  idf = ln(1 + (n − df + ½) / (df + ½)):

    Lucene's form (Kamphuis et al. 2020), bm25s's default. Words are lowercased, of two characters or more,
    neither stemmed nor filtered by a stop list.

    Parameters
    ----------
    k1 : float       saturation of the term frequency
    b : float        how much long chunks are discounted, 0 to 1

    Raises
    ------
    UsageError            an option out of range, or a workspace without text
    MissingExtraError     bm25s is not installed
    """

    name = "bm25"
    bytes_per_chunk = 0.0

    def __init__(self, *, k1: float = 1.5, b: float = 0.75) -> None:
        if k1 <= 0 or not 0 <= b <= 1:
            raise UsageError(f"bm25: k1 should be above 0 and b between 0 and 1, found {k1:g} and {b:g}")
        self.k1 = k1
        self.b = b

    def fit(self, workspace: Workspace) -> None:
        require_text(workspace, self.name)
        try:
            import bm25s
        except ModuleNotFoundError as error:
            raise require_extra("bm25s", "baselines") from error
        self._task = workspace
        # numbered in order of appearance: bm25s would number a set, in an order that changes with every run
        self._vocabulary: dict[str, int] = {}
        chunks = [
            [self._vocabulary.setdefault(word, len(self._vocabulary)) for word in _words(text)]
            for text in chunk_texts(workspace)
        ]
        self._index = None
        if not self._vocabulary:
            return
        self._index = bm25s.BM25(method="lucene", k1=self.k1, b=self.b)
        self._index.index((chunks, self._vocabulary), show_progress=False, create_empty_token=False)
        held = sum(self._index.scores[part].nbytes for part in ("data", "indices", "indptr"))
        self.bytes_per_chunk = held / workspace.n_chunks

    def score(self, queries: QuerySet) -> Iterator[np.ndarray]:
        for start in range(0, len(queries), QUERY_BLOCK):
            rows = range(start, min(start + QUERY_BLOCK, len(queries)))
            block = np.zeros((len(rows), self._task.n_chunks), np.float32)
            for position, text in enumerate(query_texts(self._task, queries, rows)):
                known = [self._vocabulary[word] for word in _words(text) if word in self._vocabulary]
                if self._index is not None and known:
                    block[position] = self._index.get_scores_from_ids(known)
            yield block


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())
