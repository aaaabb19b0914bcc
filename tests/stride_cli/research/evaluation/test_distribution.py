"""How influence is spread: blocks, curves and invariants."""

from __future__ import annotations

import numpy as np
import pytest

from stride_cli.research.evaluation.distribution import DistributionCounter


def test_record_by_hand() -> None:
    scores = np.zeros((4, 20), np.float32)
    scores[0, 0] = 1
    scores[1, :10] = 1
    scores[2] = 1
    record = DistributionCounter().add(scores).result().to_record()
    assert record["sparsity"] == pytest.approx((0.95 + 0.5 + 0 + 1) / 4)
    assert record["gini"] == pytest.approx((0.95 + 0.5 + 0) / 3)
    assert record["top10_coverage"] == pytest.approx((1 + 0.2 + 0.1) / 3)
    active = [record[f"active_{key}"] for key in ("mean", "p50", "p90")]
    assert active == pytest.approx([31 / 4, 5.5, 17]) and record["empty_queries"] == 1
