"""Opening an index whose arrays lie in many files: what is long stays mapped, and is looked through once."""

from __future__ import annotations

import tracemalloc

import numpy as np
import torch

from stride_cli.data.batches import ChunkReader
from stride_cli.operators.closed import ClosedSettings, fit_spaces
from stride_cli.operators.gradients import gradient_products
from tests.tiny_chunks import MemoryIndex, tiny_model


def test_reading_a_few_chunks_holds_nothing_of_the_others() -> None:
    """Of two million chunks each number for every one would be 16 MB."""
    n = 2_000_000
    index = MemoryIndex(40)
    index.arrays |= {
        "corpus/tokens": np.tile(np.arange(4, dtype=np.uint16), n),
        "corpus/chunk_offsets": np.arange(0, 4 * n + 1, 4),
        "corpus/loss_start": np.ones(n, np.int32),
    }
    model, chunks = tiny_model(), ChunkReader(index)
    small = ChunkReader(MemoryIndex(40))
    steered = fit_spaces(
        model, small, ClosedSettings(spaces=("residual-matrix",), layer=2, ranks={"residual-matrix": 3})
    )
    query = [torch.ones(1, steered.gate_size)]
    rows = np.array([n - 1, 3, 70, 9])
    gradient_products(steered, query, chunks, rows)
    tracemalloc.start()
    try:
        found = gradient_products(steered, query, chunks, rows)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    np.testing.assert_allclose(found, found[:, :, :1].repeat(4, axis=2), rtol=1e-5)  # all say the same
    assert peak < 4e6
