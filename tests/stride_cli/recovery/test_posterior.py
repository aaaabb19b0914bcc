"""Posterior means under a prior that is learnt from the estimates."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stride_cli.recovery.posterior import Posterior

N = 20_000


def noisy(truth: np.ndarray) -> np.ndarray:
    return truth + np.random.default_rng(1).standard_normal(len(truth))


@pytest.mark.parametrize("spread", [0.5, 2.0, 10.0])
def test_of_normal_values_it_is_the_closed_form(spread: float) -> None:
    """N(c, s²) seen with an error of 1: c + s² / (1 + s²) of the estimate's distance from c."""
    seen = noisy(3.0 + spread * np.random.default_rng(0).standard_normal(N))
    at = 3.0 + np.linspace(-1.5, 1.5, 7) * np.sqrt(1 + spread**2)
    expected = 3.0 + (at - 3.0) * spread**2 / (1 + spread**2)
    np.testing.assert_allclose(Posterior.learnt(seen)(at), expected, atol=0.2 * spread)


def test_of_noise_alone_next_to_nothing_is_left() -> None:
    seen = noisy(np.zeros(N))
    assert np.abs(Posterior.learnt(seen)(seen)).mean() < 0.05


def test_few_large_values_among_many_small_ones_are_kept() -> None:
    """Closer to the truth than the estimates are, and than any multiple of them."""
    random = np.random.default_rng(2)
    truth = random.standard_t(2, N) * 0.3
    truth[:20] = 40.0
    seen = noisy(truth)
    found = Posterior.learnt(seen)(seen)

    def error(values: np.ndarray) -> float:
        return float(np.square(values - truth)[20:].mean())

    best_multiple = min(error(seen * factor) for factor in np.linspace(0, 1, 101))
    assert error(found) < 0.9 * best_multiple
    np.testing.assert_allclose(found[:20], seen[:20], rtol=0.05)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(-50, 50), min_size=1, max_size=60), st.floats(-1e3, 1e3))
@example([0.0, 2e-313], 0.0)
def test_it_is_monotone_never_further_out_and_moves_with_what_is_given(
    values: list[float], shift: float
) -> None:
    seen = np.array(values)
    posterior = Posterior.learnt(seen)
    at = np.sort(np.concatenate([seen, np.linspace(-80, 80, 41)]))
    found = posterior(at)
    assert (np.diff(found) >= -1e-9).all()
    assert (np.abs(found - posterior.centre) <= np.abs(at - posterior.centre) + 1e-9).all()
    moved = Posterior.learnt(seen + shift)(at + shift)
    np.testing.assert_allclose(moved, found + shift, atol=0.02 * (1 + np.abs(seen).max()))


def test_nothing_to_learn_from_is_no_error() -> None:
    assert np.isfinite(Posterior.learnt(np.empty(0))(np.array([1.0, -2.0]))).all()
    np.testing.assert_allclose(Posterior.learnt(np.full(5, 2.0))(np.array([2.0])), 2.0)


def test_as_many_are_above_as_it_says() -> None:
    random = np.random.default_rng(5)
    truth = np.where(random.random(40_000) < 0.1, 3.0 * random.standard_normal(40_000), 0.0)
    estimates = truth + random.standard_normal(len(truth))
    learnt = Posterior.learnt(estimates)
    for threshold in (1.0, 3.0, 6.0):
        chances = learnt.above(estimates, np.full(len(truth), threshold))
        assert ((chances >= 0) & (chances <= 1)).all()
        assert chances.sum() == pytest.approx((truth > threshold).sum(), rel=0.1)
        # also of those of which the estimate says that they are not
        low = estimates < threshold
        assert chances[low].sum() == pytest.approx((truth[low] > threshold).sum(), rel=0.4)
    assert (np.diff(learnt.above(np.linspace(-9, 9, 50), np.full(50, 2.0))) >= -1e-12).all()
