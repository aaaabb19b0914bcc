"""Opening an index whose arrays lie in many files: what is long stays mapped, and is looked through once."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch

from index_format.reader import Index
from index_format.shards import ShardedArray
from stride_cli.data import batches
from stride_cli.data.batches import ChunkReader
from stride_cli.operators.closed import ClosedSettings, fit_spaces
from stride_cli.operators.gradients import gradient_products
from tests.index_format.sample_build import build
from tests.tiny_chunks import MemoryIndex, tiny_model


@pytest.fixture
def many_files(tmp_path: Path) -> Index:
    build(tmp_path / "many", 60, shard_bytes=64)
    return Index.open(tmp_path / "many")


def test_a_reader_maps_and_counts_as_of_one_file(many_files: Index, tmp_path: Path, monkeypatch) -> None:
    build(tmp_path / "one", 60)
    mapped, whole = ChunkReader(many_files), ChunkReader(Index.open(tmp_path / "one"))
    assert isinstance(mapped.offsets, ShardedArray) and isinstance(mapped.loss_start, ShardedArray)
    monkeypatch.setattr(batches, "ranges", lambda stop: ((i, min(i + 7, stop)) for i in range(0, stop, 7)))
    assert mapped.scored_tokens() == whole.scored_tokens()
    assert mapped.mean_length == pytest.approx(whole.lengths.mean())
    some = np.array([1, 8, 30, 31, 4])
    for mine, other in zip(mapped.plan(12, some), whole.plan(12, some), strict=True):
        np.testing.assert_array_equal(mine, other)
    assert [row for group in mapped.plan(1, some) for row in group.tolist()] == sorted(
        some.tolist(), key=lambda row: -int(np.diff(mapped.offsets[row : row + 2])[0])
    )
    assert "lengths" not in vars(mapped)  # a number for every chunk, which only passes over all of them need
    for row in (0, 5, mapped.n_chunks - 1):
        for mine, other in zip(mapped.chunk(row), whole.chunk(row), strict=True):
            np.testing.assert_array_equal(mine, other)
    ends = whole.offsets.tolist()
    assert [token for token in range(ends[-1] + 2) if mapped._ends_chunk(token)] == ends


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
