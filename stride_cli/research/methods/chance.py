"""Random scores: the zero of every measure of agreement."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from stride_cli.randomness import stream
from stride_cli.research.methods.protocol import query_blocks

if TYPE_CHECKING:
    from stride_cli.data.query_set import QuerySet
    from stride_cli.data.workspace import Workspace


class Chance:
    """Independent standard normal scores.

    They follow from the workspace's seed and the query's tokens, not from the order or grouping of queries.
    """

    name = "chance"
    bytes_per_chunk = 0.0

    def fit(self, workspace: Workspace) -> None:
        self._seed = workspace.seed
        self._n_chunks = workspace.n_chunks

    def score(self, queries: QuerySet) -> Iterator[np.ndarray]:
        for rows in query_blocks(queries):
            block = np.empty((len(rows), self._n_chunks), np.float32)
            for position, row in enumerate(rows):
                content = queries.ids[row].tobytes() + queries.weights[row].tobytes()
                number = int.from_bytes(hashlib.sha256(content).digest()[:8], "little")
                random = stream(self._seed, "chance scores", 0, number)
                block[position] = random.standard_normal(self._n_chunks, dtype=np.float32)
            yield block
