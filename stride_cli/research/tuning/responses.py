"""Queries held out of the corpus, and random halves of the rest: what settings are judged on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stride_cli.data.batches import ChunkReader
from stride_cli.errors import UsageError
from stride_cli.randomness import stream

if TYPE_CHECKING:
    from index_format.reader import Index
    from stride_cli.data.query_set import QuerySet
    from stride_cli.data.workspace import Workspace


class WithheldChunks(ChunkReader):
    """Chunks of an index with some of them unscored, so that they leave no trace in operators.

    Parameters
    ----------
    withheld : (m,) int64      chunks without loss weights
    """

    def __init__(self, index: Index, withheld: np.ndarray) -> None:
        super().__init__(index)
        self._withheld = frozenset(np.asarray(withheld).tolist())

    def chunk(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """See `ChunkReader.chunk`."""
        ids, weights = super().chunk(row)
        return ids, (np.zeros_like(weights) if int(row) in self._withheld else weights)

    def scored_tokens(self) -> int:
        """See `ChunkReader.scored_tokens`."""
        return super().scored_tokens() - sum(
            int(super(WithheldChunks, self).chunk(row)[1].sum()) for row in self._withheld
        )


def withheld_queries(workspace: Workspace, count: int) -> tuple[QuerySet, np.ndarray]:
    """Draw chunks of the corpus as queries; also their numbers, (m,) int64, ascending.

    Raises
    ------
    UsageError      that would be more than a quarter of the chunks with a scored token
    """
    from stride_cli.data.query_set import QuerySet

    order = stream(workspace.seed, "tuning queries").permutation(workspace.n_chunks)
    scored = [int(row) for row in order if workspace.chunks.chunk(int(row))[1][1:].any()]
    if not 1 <= count <= len(scored) // 4:
        raise UsageError(
            f"--held-out is {count}, and the index has {len(scored)} chunks with a scored token "
            f"(expected 1 to {len(scored) // 4}, a quarter)",
            fix="give fewer, or queries of your own: --queries FILE",
        )
    rows = np.sort(scored[:count]).astype(np.int64)
    pairs = [workspace.chunks.chunk(int(row)) for row in rows]
    queries = QuerySet(
        [np.asarray(ids, np.int64) for ids, _ in pairs],
        [weights for _, weights in pairs],
        [f"chunk {row}" for row in rows],
    )
    return queries, rows


def random_halves(workspace: Workspace, withheld: np.ndarray, count: int) -> np.ndarray:
    """Draw random halves of the chunks that are not withheld, (R, n) bool; more can be added later."""
    rest = np.setdiff1d(np.arange(workspace.n_chunks), withheld)
    masks = np.zeros((count, workspace.n_chunks), bool)
    for number, mask in enumerate(masks):
        order = stream(workspace.seed, "tuning halves", number).permutation(len(rest))
        mask[rest[order[: len(rest) // 2]]] = True
    return masks
