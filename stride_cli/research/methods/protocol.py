"""What every attribution method is to the evaluation: fitted once, then scored query by query."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    from stride_cli.data.query_set import QuerySet
    from stride_cli.data.workspace import Workspace


class Method(Protocol):
    """An attribution method.

    Attributes
    ----------
    name : str             as on the command line
    bytes_per_chunk : float
        What `fit` left for later queries (on disk, or where it would be), in bytes per chunk; 0 where a query
        needs only the corpus itself.

    A class may say ``shares_a_pass = True``: all queries of a call of `score` share passes over the corpus,
    which are most of what it takes.
    """

    name: str
    bytes_per_chunk: float

    def fit(self, workspace: Workspace) -> None:
        """Do once whatever does not depend on the queries."""
        ...

    def score(self, queries: QuerySet) -> Iterator[np.ndarray]:
        """Influence of every chunk on every query, block after block in the order of the queries.

        Yields
        ------
        ndarray (q, n) float32, q ≤ QUERY_BLOCK
            Positive where training on the chunk lowers the loss on the query; units differ by method.
        """
        ...


def score_all(method: Method, queries: QuerySet) -> np.ndarray:
    """All blocks of `Method.score` as one array, (Q, n) float32."""
    blocks = list(method.score(queries))
    return np.concatenate(blocks) if blocks else np.zeros((0, 0), np.float32)
