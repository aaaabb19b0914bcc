"""An index's arrays in memory: tokens of documents, cut into chunks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest


class TokenIndex:
    """What lexical evidence reads of an index."""

    def __init__(self, documents: Sequence[Sequence[int]], block_size: int) -> None:
        chunks = [
            list(document[start : start + block_size])
            for document in documents
            for start in range(0, len(document), block_size)
        ]
        counts = [-(-len(document) // block_size) for document in documents]
        lengths = [len(chunk) for chunk in chunks]
        self.arrays = {
            "corpus/tokens": np.array([token for chunk in chunks for token in chunk], np.uint16),
            "corpus/chunk_offsets": np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            "corpus/document_offsets": np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        }
        self.n_chunks = len(chunks)
        self.n_tokens = len(self.arrays["corpus/tokens"])

    def array(self, name: str) -> np.ndarray:
        return self.arrays[name]

    def chunk_tokens(self, chunk: int) -> np.ndarray:
        first, last = self.arrays["corpus/chunk_offsets"][chunk : chunk + 2]
        return self.arrays["corpus/tokens"][first:last]


@pytest.fixture(scope="session")
def token_index() -> Callable[..., TokenIndex]:
    return TokenIndex
