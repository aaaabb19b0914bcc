"""Merge scores of documents for many queries into one order, and name the query that chose each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
    rank : float      its place in the order that chose it: the best rank over queries (greedy, quota), or the
                      place by summed scores; NaN where nothing speaks for it and lots were drawn
    score : float     its score for `query` (greedy, quota), or summed over queries
    query : int       the query that chose it: of the best rank, or of the largest score; -1 for a lot
    """

    document: int
    rank: float
    score: float
    query: int


@dataclass
class Order:
    """Best ranks and sums over all queries of one task, for every document.

    Attributes
    ----------
    best_rank : (D,) float64      min over queries of the mid-rank (app:selection_metrics); inf where no query
                                  has a score above zero: what ties at zero is no evidence
    best_score, best_query : (D,) the score there, and the query
    largest, largest_query : (D,) the largest score of any query
    total : (D,) float64          sum over queries
    """

    best_rank: np.ndarray
    best_score: np.ndarray
    best_query: np.ndarray
    largest: np.ndarray
    largest_query: np.ndarray
    total: np.ndarray

    @classmethod
    def empty(cls, n_documents: int) -> Order:
        return cls(
            np.full(n_documents, np.inf),
            np.zeros(n_documents),
            np.full(n_documents, -1, np.int64),
            np.full(n_documents, -np.inf),
            np.full(n_documents, -1, np.int64),
            np.zeros(n_documents),
        )

    def add(self, query: int, scores: np.ndarray) -> None:
        """Add one query's scores (D,); above zero they support it."""
        ranks = np.where(scores > 0, descending_mid_ranks(scores), np.inf)
        better = ranks < self.best_rank
        self.best_rank[better] = ranks[better]
        self.best_score[better] = scores[better]
        self.best_query[better] = query
        larger = scores > self.largest
        self.largest[larger] = scores[larger]
        self.largest_query[larger] = query
        self.total += scores

    def by_rank(self, lots: np.ndarray) -> np.ndarray:
        """Order documents by best rank; equal ones by summed score, then by lot."""
        return np.lexsort((lots, -self.total, self.best_rank))

    def by_sum(self, lots: np.ndarray) -> np.ndarray:
        """Order documents by summed score; equal ones by lot."""
        return np.lexsort((lots, -self.total))


def collect(
    rows: Iterable[np.ndarray], n_documents: int, tasks: Sequence[str] | None = None
) -> dict[str, Order]:
    """Collect one `Order` a task from the scores of one query after the other.

    Parameters
    ----------
    rows : Q arrays (D,)
    tasks : Q names, optional      None: all queries are one task, called ""
    """
    orders: dict[str, Order] = {}
    for query, scores in enumerate(rows):
        name = "" if tasks is None else tasks[query]
        orders.setdefault(name, Order.empty(n_documents)).add(query, np.asarray(scores, np.float64))
    return orders


def choose(orders: dict[str, Order], size: int, by: str, *, seed: int = 0) -> list[Choice]:
    """Choose `size` documents to train on.

    greedy: by best rank over all queries (app:selection_metrics). sum: by summed score. quota: the tasks
    choose in turn, each the best document by greedy rank over its own queries that is not taken yet.

    Parameters
    ----------
    orders : as from `collect`; one task except for quota
    by : "greedy", "sum" or "quota"
    seed : of the lots that break ties

    Raises
    ------
    UsageError      more documents than there are
    """
    n_documents = len(next(iter(orders.values())).total)
    check_size(size, n_documents)
    lots = stream(seed, "selection lots").permutation(n_documents)
    if by == "sum":
        (order,) = orders.values()
        found = []
        for place, document in enumerate(order.by_sum(lots)[:size], 1):
            total, query = float(order.total[document]), int(order.largest_query[document])
            rank, by_query = (place, query) if total else (np.nan, -1)
            found.append(Choice(int(document), rank, total, by_query))
        return found
    lists = [(order, iter(order.by_rank(lots))) for order in orders.values()]
    taken: set[int] = set()
    chosen: list[Choice] = []
    while len(chosen) < size:
        for order, documents in lists:
            if len(chosen) == size:
                break
            document = next(int(d) for d in documents if int(d) not in taken)
            taken.add(document)
            rank, query = float(order.best_rank[document]), int(order.best_query[document])
            if np.isfinite(rank):
                chosen.append(Choice(document, rank, float(order.best_score[document]), query))
            else:
                chosen.append(Choice(document, np.nan, float(order.total[document]), query))
    return chosen


def check_size(size: int, n_documents: int) -> None:
    """Raise UsageError where a selection of `size` cannot be made."""
    if size > n_documents:
        raise UsageError(
            f"--size is {size:,}, and the corpus has {n_documents:,} documents", fix=f"at most {n_documents}"
        )
