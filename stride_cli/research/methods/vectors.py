"""One vector for every chunk, compared with queries by cosine or inner product."""

from __future__ import annotations

import tempfile

import numpy as np

IN_MEMORY = 1 << 30  # bytes; a larger table is a file without a name in the temporary directory
SIMILARITY_CHUNKS = 200_000  # chunks compared with a block of queries at once (app:baseline_details)


class VectorTable:
    """Vectors of n chunks.

    Parameters
    ----------
    n_chunks, width : int
    normalise : bool      scale them to length 1, queries' too, so that products are cosines

    Attributes
    ----------
    vectors : (n, width) float32      zero rows stay zero, and have product 0 with everything
    """

    def __init__(self, n_chunks: int, width: int, *, normalise: bool = True) -> None:
        self._prepare = unit if normalise else _as_given
        if 4 * n_chunks * width <= IN_MEMORY:
            self.vectors = np.zeros((n_chunks, width), np.float32)
        else:
            with tempfile.TemporaryFile() as file:  # the mapping keeps it until the table is gone
                self.vectors = np.memmap(file, np.float32, "w+", shape=(n_chunks, width))
        self.bytes_per_chunk = 4.0 * width

    def put(self, rows: np.ndarray, vectors: np.ndarray) -> None:
        """Store vectors (b, width), as those of chunks ``rows`` (b,)."""
        self.vectors[rows] = self._prepare(vectors)

    def products(self, vectors: np.ndarray) -> np.ndarray:
        """Product of every chunk's vector with each of vectors (q, width): (q, n) float32."""
        wanted = self._prepare(vectors)
        block = np.empty((len(wanted), len(self.vectors)), np.float32)
        for start in range(0, len(self.vectors), SIMILARITY_CHUNKS):
            part = self.vectors[start : start + SIMILARITY_CHUNKS]
            np.matmul(wanted, part.T, out=block[:, start : start + len(part)])
        return block


def unit(vectors: np.ndarray) -> np.ndarray:
    """Rows scaled to length 1, float32; rows of zeros stay zero."""
    vectors = np.asarray(vectors, np.float32)
    length = np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors / np.where(length > 0, length, 1)


def _as_given(vectors: np.ndarray) -> np.ndarray:
    return np.asarray(vectors, np.float32)
