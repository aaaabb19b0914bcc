"""Truncation keeps the strongest scores, with their signs; shrinking keeps their order."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from stride_cli.research.methods.truncation import keep_top, shrink_scores

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


def test_what_every_chunk_has_in_common_is_taken_off_before_shrinking() -> None:
    scores = np.random.default_rng(0).standard_t(3, (4, 500)).astype(np.float32)
    shrunk = shrink_scores(scores)
    np.testing.assert_allclose(shrink_scores(scores + 7), shrunk, rtol=1e-3, atol=1e-5)
    centred = scores - scores.mean(axis=1, keepdims=True, dtype=np.float64)
    largest = np.abs(centred).max(axis=1, keepdims=True)
    expected = centred * (np.abs(centred) / largest) ** 0.3 * np.where(centred < 0, 0.3, 1.0)
    np.testing.assert_allclose(shrunk, expected, rtol=1e-5)
    assert shrunk.dtype == np.float32
