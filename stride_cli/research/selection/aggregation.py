"""Merge scores of documents for many queries into one order, and name the query that chose each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from stride_cli.errors import UsageError
from stride_cli.randomness import stream
from stride_cli.research.evaluation.metrics import descending_mid_ranks


@dataclass(frozen=True)
class Choice:
    """One chosen document.

    Attributes
    ----------
    document : int
    rank : float      its best rank over queries; NaN where no query supports it and lots were drawn
    score : float     its score for `query`; of a lot, summed over queries
    query : int       the query of the best rank; -1 for a lot
    """

    document: int
    rank: float
    score: float
    query: int


def choose(rows: Iterable[np.ndarray], n_documents: int, size: int, *, seed: int = 0) -> list[Choice]:
    """Choose the `size` documents of best rank over all queries (app:selection_metrics).

    Equal ranks are ordered by summed score, then by lot. A score of zero or below supports nothing: ties at
    zero have no rank.

    Parameters
    ----------
    rows : (D,) scores for each query; > 0 supports it
    seed : of the lots that break ties

    Raises
    ------
    UsageError      more documents than there are
    """
    check_size(size, n_documents)
    best_rank, best_score = np.full(n_documents, np.inf), np.zeros(n_documents)
    best_query, total = np.full(n_documents, -1, np.int64), np.zeros(n_documents)
    for query, row in enumerate(rows):
        scores = np.asarray(row, np.float64)
        ranks = np.where(scores > 0, descending_mid_ranks(scores), np.inf)
        better = ranks < best_rank
        best_rank[better], best_score[better], best_query[better] = ranks[better], scores[better], query
        total += scores
    lots = stream(seed, "selection lots").permutation(n_documents)
    ranked = np.isfinite(best_rank)
    return [
        Choice(
            int(document),
            float(best_rank[document]) if ranked[document] else np.nan,
            float((best_score if ranked[document] else total)[document]),
            int(best_query[document]),
        )
        for document in np.lexsort((lots, -total, best_rank))[:size]
    ]


def check_size(size: int, n_documents: int) -> None:
    """Raise UsageError where a selection of `size` cannot be made."""
    if size > n_documents:
        raise UsageError(
            f"--size is {size:,}, and the corpus has {n_documents:,} documents", fix=f"at most {n_documents}"
        )
