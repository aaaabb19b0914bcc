"""Responses of several checkpoints made one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stride_cli.measurement.additive import additive_measurement
from stride_cli.measurement.checkpoints import combine_checkpoints


def drawn(seed: int, count: int, queries: int, subsets: int) -> tuple[list[np.ndarray], np.ndarray]:
    random = np.random.default_rng(seed)
    scales = np.exp(random.normal(0, 3, (count, queries, 1)))
    responses = random.normal(size=(count, queries, subsets)) * scales + random.normal(size=(count, 1, 1))
    return list(responses), random.integers(1, 9, subsets)


@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.integers(1, 4), st.integers(2, 30), st.booleans())
def test_what_the_recovery_explains_is_the_mean_at_the_first_ones_spread(
    seed: int, count: int, queries: int, subsets: int, intercept: bool
) -> None:
    responses, sizes = drawn(seed, count, queries, subsets)

    def explained(values: np.ndarray) -> np.ndarray:
        return additive_measurement(values, sizes) if intercept else values

    found = explained(combine_checkpoints(responses, sizes if intercept else None))
    expected = np.zeros((queries, subsets))
    for query in range(queries):
        first = np.std(explained(responses[0][query]))
        for values in responses:
            y = explained(values[query])
            expected[query] += y * first / np.std(y) / count
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9 * np.abs(expected).max() + 1e-12)


def test_one_checkpoint_is_left_as_it_is() -> None:
    (alone,), sizes = drawn(1, 1, 3, 8)
    assert combine_checkpoints([alone], sizes) is alone


def test_the_scale_of_the_others_does_not_matter_and_that_of_the_first_does() -> None:
    (first, second), sizes = drawn(2, 2, 3, 20)
    usual = combine_checkpoints([first, second], sizes)
    np.testing.assert_allclose(combine_checkpoints([first, 1e6 * second], sizes), usual, rtol=1e-9)
    np.testing.assert_allclose(combine_checkpoints([5 * first, second], sizes), 5 * usual, rtol=1e-9)


def test_a_checkpoint_that_answers_nothing_adds_nothing() -> None:
    (first, second), sizes = drawn(3, 2, 2, 20)
    silent = np.zeros_like(second)
    np.testing.assert_allclose(combine_checkpoints([first, silent], sizes), first / 2)
    assert not combine_checkpoints([silent, second], sizes).any()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_stays_so(bad: float) -> None:
    (first, second), sizes = drawn(4, 2, 2, 20)
    second[1, 3] = bad
    found = combine_checkpoints([first, second], sizes)
    assert np.isfinite(found[0]).all() and not np.isfinite(found[1]).all()
