"""p-values: uniform where nothing is going on, mid-ranks for ties, zeros never evidence; q against SciPy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import false_discovery_control, kstest, rankdata

from stride_cli.audit.calibration import benjamini_hochberg, combined_p_values, fewest_controls, p_values

VALUES = st.lists(st.integers(0, 5), min_size=1, max_size=30)


@given(statistic=st.integers(0, 5), controls=VALUES)
def test_p_is_the_mid_rank_among_item_and_controls(statistic: int, controls: list[int]) -> None:
    pool = np.array([statistic, *controls], float)
    from_the_top = rankdata(-pool)[0]  # ties in the middle
    # the item's own place is not halved: p is never below 1 / (m + 1)
    expected = (from_the_top + 0.5 * 0) / len(pool)
    assert p_values(np.array([statistic]), np.array(controls))[0] == pytest.approx(expected)


def test_one_statistic_combined_is_that_statistic() -> None:
    generator = np.random.default_rng(0)
    controls, items = generator.normal(size=(60, 1)), generator.normal(size=(9, 1))
    alone = p_values(items[:, 0], controls[:, 0])
    np.testing.assert_allclose(combined_p_values(items, controls, zero_is_nothing=[False]), alone)


@pytest.mark.parametrize("dependence", [0.0, 0.9])
def test_uniform_under_the_null(dependence: float) -> None:
    """Also where the statistics depend on each other, and most influences are exactly zero."""
    generator = np.random.default_rng(1)
    found = []
    for _ in range(400):
        common = generator.normal(size=40)
        loss = np.sqrt(1 - dependence) * generator.normal(size=40) + np.sqrt(dependence) * common
        share = np.maximum(
            0, np.sqrt(1 - dependence) * generator.normal(size=40) + np.sqrt(dependence) * common
        )
        both = np.stack([loss, share], axis=1)
        found.append(combined_p_values(both[:1], both[1:], zero_is_nothing=[False, True])[0])
    # on a grid of 1/40: spread over it before comparing with the continuous law
    spread = np.array(found) - generator.random(400) / 40
    assert kstest(spread, "uniform").pvalue > 0.01
    assert np.mean(np.array(found) <= 0.05) < 0.08


def test_both_statistics_are_needed_to_be_unusual_only_once() -> None:
    generator = np.random.default_rng(2)
    controls = np.abs(generator.normal(size=(199, 2)))
    items = np.array([[9.0, 9.0], [9.0, 0.5], [0.5, 9.0], [0.5, 0.5]])
    p = combined_p_values(items, controls, zero_is_nothing=[False, True])
    assert p[0] == 1 / 200 and p[1] < 0.05 and p[2] < 0.05 and p[3] > 0.2


def test_zeros_are_never_evidence() -> None:
    """An influence of zero ranks last even where other influences are below zero or zero as well."""
    controls = np.stack([np.linspace(0, 1, 99), np.where(np.arange(99) < 50, 0.0, -1.0)], axis=1)
    top = combined_p_values(np.array([[2.0, 0.0]]), controls, zero_is_nothing=[False, True])
    alone = p_values(np.array([2.0]), controls[:, 0])
    np.testing.assert_allclose(top, alone)
    same = combined_p_values(np.zeros((1, 1)), np.zeros((99, 1)), zero_is_nothing=[True])
    assert same[0] > 0.5


@given(st.lists(st.floats(0, 1), min_size=1, max_size=40))
def test_q_as_scipy(p: list[float]) -> None:
    np.testing.assert_allclose(benjamini_hochberg(np.array(p)), false_discovery_control(p), atol=1e-12)


def test_fewest_controls_let_one_item_through() -> None:
    m = fewest_controls(37, 0.05)
    assert 37 / (m + 1) < 0.05 and 37 / (m - 1) > 0.05
