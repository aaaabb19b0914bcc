"""The same fit in bf16: the same answers to a stated tolerance."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from stride_cli.data.batches import ChunkReader
from stride_cli.operators.closed import ClosedSettings, fit_closed
from stride_cli.operators.exact_response import pearson
from stride_cli.operators.linear_response import measure_linear
from stride_cli.operators.steered_model import SteeredModel

K = 12
SETTINGS = ClosedSettings(
    spaces=("residual-matrix", "logit"), layer=2, ranks={"residual-matrix": 5, "logit": 4}
)


@pytest.fixture(scope="module")
def columns() -> np.ndarray:
    random = np.random.default_rng(1)
    return np.stack([np.sort(random.choice(K, 3, replace=False)) for _ in range(40)]).astype(np.uint16)


@pytest.fixture(scope="module")
def reference(model, chunks: ChunkReader, columns: np.ndarray) -> np.ndarray:
    operators = fit_closed(model, chunks, columns, K, SETTINGS)
    return measure_linear(SteeredModel.of(model, operators), chunks.batch(np.arange(6)))


def test_bf16_gives_the_same_responses(fresh_model, chunks: ChunkReader, columns, reference) -> None:
    half = fresh_model()
    half.model.to(torch.bfloat16)
    operators = fit_closed(half, chunks, columns, K, SETTINGS)
    found = measure_linear(SteeredModel.of(half, operators), chunks.batch(np.arange(6)))
    assert found.dtype == np.float64
    assert np.mean([pearson(a, b) for a, b in zip(found, reference, strict=True)]) > 0.97
