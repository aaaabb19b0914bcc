"""Every path of the fit, the query and the reading on a CUDA device: what the CPU says, to 1e-4 relative."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.gpu.device_paths import TOLERANCE, compare, paths

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is here"),
]


@pytest.mark.parametrize("name", paths())
def test_cuda_and_cpu_agree(name: str) -> None:
    (record,) = compare("cuda", name)
    assert record["ok"], record
    assert record["difference"] <= TOLERANCE


def test_a_fit_is_the_same_twice() -> None:
    """Bit for bit: no number is added to from two sides at once."""
    from tests.gpu.device_paths import EVERY_SPACE, Paths

    first, second = (Paths("cuda").fit(EVERY_SPACE, project=64) for _ in range(2))
    for one, other in zip(first.gates, second.gates, strict=True):
        assert np.array_equal(one, other)
    assert np.array_equal(first.projections.codes, second.projections.codes)


def test_out_of_memory_halves_batches() -> None:
    """A batch that needs more than there is left of the device's memory."""
    from stride_cli.operators.device_memory import ShrinkingBatches, free_bytes
    from tests.gpu.device_paths import Paths

    chunks, device = Paths("cpu").chunks, torch.device("cuda")
    free = free_bytes(device)
    assert free is not None

    def greedy(batch: Any) -> int:
        held = torch.empty(len(batch.rows) * (free // 5), dtype=torch.uint8, device=device)
        return len(held) and len(batch.rows)

    batches = [chunks.batch(np.arange(8))] * 2  # as long as each other
    found = list(ShrinkingBatches().each(batches, greedy))
    assert [count for _, count in found] == [4, 4, 4, 4]
