"""How influence is spread: blocks, curves and invariants."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from stride_cli.research.evaluation.distribution import describe


@given(
    st.integers(1, 60).flatmap(
        lambda n: arrays(np.float32, (6, n), elements=st.one_of(st.just(0.0), st.floats(-1e3, 1e3, width=32)))
    )
)
def test_blocks_do_not_matter_and_curves_rise_to_one(scores: np.ndarray) -> None:
    whole, parts = describe([scores]), describe([scores[:1], scores[1:4], scores[4:]])
    assert whole.active.tolist() == parts.active.tolist()
    assert whole.gini == pytest.approx(parts.gini, nan_ok=True)
    assert (np.diff(whole.curve_mass) >= -1e-9).all() and whole.curve_share[-1] == 1
    if scores.any():
        assert whole.curve_mass[-1] == pytest.approx(1)
        # concentration: the top share of the chunks never holds less than that share
        assert (whole.curve_mass >= whole.curve_share - 1e-6).all()


def test_record_by_hand() -> None:
    scores = np.zeros((4, 20), np.float32)
    scores[0, 0] = 1
    scores[1, :10] = 1
    scores[2] = 1
    record = describe([scores]).to_record()
    assert record["sparsity"] == pytest.approx((0.95 + 0.5 + 0 + 1) / 4)
    assert record["gini"] == pytest.approx((0.95 + 0.5 + 0) / 3)
    assert record["top10_coverage"] == pytest.approx((1 + 0.2 + 0.1) / 3)
    active = [record[f"active_{key}"] for key in ("mean", "p50", "p90")]
    assert active == pytest.approx([31 / 4, 5.5, 17]) and record["empty_queries"] == 1
