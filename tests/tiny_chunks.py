"""A tiny random NanoChat model and a random corpus of chunks, with the arrays that an index would hold."""

from __future__ import annotations

import numpy as np
import pytest

VOCABULARY = 61


class MemoryIndex:
    """The arrays of an index that `ChunkReader` reads, in memory."""

    def __init__(self, n_chunks: int, *, seed: int = 0, masked: bool = False) -> None:
        random = np.random.default_rng(seed)
        lengths = random.integers(2, 30, n_chunks)
        total = int(lengths.sum())
        self.arrays = {
            "corpus/tokens": random.integers(0, VOCABULARY, total).astype(np.uint16),
            "corpus/chunk_offsets": np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            "corpus/loss_start": random.integers(1, 3, n_chunks).astype(np.int32),
        }
        if masked:
            self.arrays["corpus/loss_mask"] = random.integers(0, 2, total).astype(np.uint8)

    def array(self, name: str) -> np.ndarray:
        return self.arrays[name]

    def has(self, name: str) -> bool:
        return name in self.arrays


def tiny_model(seed: int = 0):
    """NanoChat, 3 layers, d = 24, with weights large enough that its predictions are far from uniform."""
    from stride_cli.models.language.causal_lm import CausalLM
    from tests.tiny_models import tiny_nanochat

    return CausalLM(tiny_nanochat(VOCABULARY, width=24, layers=3, seed=seed))


@pytest.fixture(scope="session")
def model():
    return tiny_model()


@pytest.fixture(scope="session")
def chunks():
    from stride_cli.data.batches import ChunkReader

    return ChunkReader(MemoryIndex(40))


@pytest.fixture(scope="session")
def fresh_model():
    """A function that makes another copy of the tiny model, for tests that damage it."""
    return tiny_model
