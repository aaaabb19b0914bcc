"""One vector for every chunk, compared with queries by cosine or inner product."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from stride_cli.research.methods.protocol import TEXT_BLOCK

if TYPE_CHECKING:
    from stride_cli.data.workspace import Workspace

IN_MEMORY = 1 << 30  # bytes; a larger table is a file without a name in the temporary directory
SIMILARITY_CHUNKS = 200_000  # chunks compared with a block of queries at once (app:baseline_details)


class VectorTable:
    """Vectors of n chunks.

    Parameters
    ----------
    n_chunks, width : int
    normalise : bool      scale them and the queries' to length 1, so that products are cosines

    Attributes
    ----------
    vectors : (n, width) float32      zero rows stay zero, and have product 0 with everything
    """

    def __init__(self, n_chunks: int, width: int, *, normalise: bool = True) -> None:
        self._normalise = normalise
        if 4 * n_chunks * width <= IN_MEMORY:
            self.vectors = np.zeros((n_chunks, width), np.float32)
        else:
            with tempfile.TemporaryFile() as file:  # the mapping keeps it until the table is gone
                self.vectors = np.memmap(file, np.float32, "w+", shape=(n_chunks, width))
        self.bytes_per_chunk = 4.0 * width

    @classmethod
    def of_texts(
        cls, workspace: Workspace, embed: Callable[[list[str]], np.ndarray], *, normalise: bool = True
    ) -> VectorTable:
        """Embed the text of every chunk; `embed` maps texts to (texts, width)."""
        table = None
        for start in range(0, workspace.n_chunks, TEXT_BLOCK):
            rows = np.arange(start, min(start + TEXT_BLOCK, workspace.n_chunks))
            vectors = embed(workspace.texts(rows))
            table = table or cls(workspace.n_chunks, vectors.shape[1], normalise=normalise)
            table.put(rows, vectors)
        return table or cls(0, 0)

    def put(self, rows: np.ndarray, vectors: np.ndarray) -> None:
        """Store vectors (b, width) as those of chunks ``rows`` (b,)."""
        self.vectors[rows] = self._prepared(vectors)

    def products(self, vectors: np.ndarray) -> np.ndarray:
        """Multiply vectors (q, width) with those of every chunk: (q, n) float32."""
        block = np.empty((len(vectors), len(self.vectors)), np.float32)
        if not block.size:  # a corpus without chunks
            return block
        wanted = self._prepared(vectors)
        for start in range(0, len(self.vectors), SIMILARITY_CHUNKS):
            part = self.vectors[start : start + SIMILARITY_CHUNKS]
            np.matmul(wanted, part.T, out=block[:, start : start + len(part)])
        return block

    def _prepared(self, vectors: np.ndarray) -> np.ndarray:
        return unit(vectors) if self._normalise else np.asarray(vectors, np.float32)


def unit(vectors: np.ndarray) -> np.ndarray:
    """Scale rows to length 1, float32; rows of zeros stay zero."""
    vectors = np.asarray(vectors, np.float32)
    length = np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors / np.where(length > 0, length, 1)
