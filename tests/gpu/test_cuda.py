"""Every path of the fit, the query and the reading on a CUDA device: what the CPU says, to 1e-4 relative."""

from __future__ import annotations

from typing import Any

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

    batches = [chunks.batch(torch.arange(8).numpy()), chunks.batch(torch.arange(8, 16).numpy())]
    found = list(ShrinkingBatches().each(batches, greedy))
    assert [count for _, count in found] == [4, 4, 4, 4]
