"""Many queries at once, read from a file or given as sequences: batches like those of an index's chunks."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from stride_cli.data.batches import Batch, consecutive_groups, pad_batch
from stride_cli.errors import QueryError

if TYPE_CHECKING:
    from stride_cli.data.queries import Query
    from stride_cli.data.workspace import Workspace
    from stride_cli.models.protocol import AttributableModel

QUERY_BLOCK = 32  # rows of one block of scores
QUERY_TOKENS = 4096  # padded tokens of queries measured at once


class QuerySet:
    """Q sequences with their scored positions.

    Parameters
    ----------
    ids : sequence of (T,) int64           token ids
    weights : sequence of (T,) float32     1 where a token is scored; at least one a query
    names : sequence of str                what a query is called in results
    texts : sequence of str, optional      prompt and response, or the whole text; None for what is not text

    Raises
    ------
    QueryError      a query has no scored token; names it
    """

    def __init__(
        self,
        ids: Sequence[np.ndarray],
        weights: Sequence[np.ndarray],
        names: Sequence[str],
        texts: Sequence[str] | None = None,
    ) -> None:
        self.ids = [np.asarray(row, np.int64) for row in ids]
        self.weights = [np.asarray(row, np.float32) for row in weights]
        self.names = list(names)
        self.texts = None if texts is None else list(texts)
        for name, weight in zip(self.names, self.weights, strict=True):
            if not weight[1:].any():
                raise QueryError(
                    f"query '{name}' has no scored token", fix="give it two tokens or more, or a response"
                )

    def __len__(self) -> int:
        return len(self.ids)

    @classmethod
    def from_queries(cls, queries: Sequence[Query], names: Sequence[str] | None = None) -> QuerySet:
        """Queries as `build_queries` makes them."""
        return cls(
            [query.ids for query in queries],
            [query.weights for query in queries],
            names if names is not None else [str(number) for number in range(len(queries))],
            [query.prompt + query.response for query in queries],
        )

    @classmethod
    def of_parts(cls, query: Query) -> tuple[QuerySet, list[float]]:
        """The parts of a query, each a query of its own whose scored tokens count alike, and their weights in
        its loss (1 without parts)."""
        parts = query.sequences
        found = cls(
            [part.ids for part in parts],
            [part.weights > 0 for part in parts],
            [str(number) for number in range(len(parts))],
            [query.prompt + query.response] * len(parts),
        )
        return found, [part.share for part in parts]

    def batch(self, rows: np.ndarray | Sequence[int]) -> Batch:
        """The given queries as one batch."""
        rows = np.asarray(rows, np.int64)
        return pad_batch(rows, [self.ids[row] for row in rows], [self.weights[row] for row in rows])

    def groups(
        self, model: AttributableModel, batch_tokens: int, rows: np.ndarray | None = None
    ) -> list[np.ndarray]:
        """All queries (or the given ones) in order, in groups of at most ``batch_tokens`` padded tokens that
        a model reads as it reads each alone."""
        rows = np.arange(len(self)) if rows is None else np.asarray(rows, np.int64)
        lengths = [len(self.ids[row]) for row in rows]
        return [rows[group] for group in consecutive_groups(lengths, batch_tokens, model.length_kinds)]

    def take(self, rows: Sequence[int] | np.ndarray) -> QuerySet:
        """The given queries only."""
        chosen = [int(row) for row in rows]
        return QuerySet(
            [self.ids[row] for row in chosen],
            [self.weights[row] for row in chosen],
            [self.names[row] for row in chosen],
            None if self.texts is None else [self.texts[row] for row in chosen],
        )

    def fingerprint(self) -> str:
        """SHA-256 in hex over ids and weights, in order."""
        digest = hashlib.sha256()
        for ids, weights in zip(self.ids, self.weights, strict=True):
            digest.update(np.int64(len(ids)).tobytes() + ids.tobytes() + weights.tobytes())
        return digest.hexdigest()


def query_texts(workspace: Workspace, queries: QuerySet, rows: np.ndarray | range) -> list[str]:
    """The text of the given queries: their token ids decoded, as those of chunks are."""
    tokenizer = workspace.model.tokenizer
    return [str(tokenizer.decode(queries.ids[int(row)], skip_special_tokens=True)) for row in rows]
