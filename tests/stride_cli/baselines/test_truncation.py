"""Truncation keeps the strongest scores, with their signs."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from stride_cli.baselines.truncation import keep_top

values = st.sampled_from([-2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 3.0])  # ties are frequent


@given(
    arrays(np.float32, st.tuples(st.integers(0, 3), st.integers(1, 12)), elements=values), st.integers(1, 14)
)
def test_the_strongest_stay(block: np.ndarray, top: int) -> None:
    kept = keep_top(block, top)
    assert kept.shape == block.shape and kept.dtype == np.float32
    for row, scores in zip(kept, block, strict=True):
        order = np.argsort(-np.abs(scores), kind="stable")[:top]
        expected = np.zeros_like(scores)
        expected[order] = scores[order]
        np.testing.assert_array_equal(row, expected)
