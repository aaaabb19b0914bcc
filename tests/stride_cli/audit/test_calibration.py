"""p-values: uniform where nothing is going on, mid-ranks for ties, zeros never evidence; q against SciPy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import false_discovery_control, kstest, rankdata

from stride_cli.audit.calibration import benjamini_hochberg, fewest_controls, joint_p_values, p_values

VALUES = st.lists(st.integers(0, 5), min_size=1, max_size=30)


@settings(deadline=None, max_examples=50)
@given(statistic=st.integers(0, 5), controls=VALUES)
def test_p_is_the_mid_rank_among_item_and_controls(statistic: int, controls: list[int]) -> None:
    pool = np.array([statistic, *controls], float)
    expected = rankdata(-pool)[0] / len(pool)  # from the top, ties in the middle
    assert p_values(np.array([statistic]), np.array(controls))[0] == pytest.approx(expected)


@pytest.mark.parametrize("dependence", [0.0, 0.9])
def test_uniform_under_the_null(dependence: float) -> None:
    """Each p-value by itself; of both together, never too small, and uniform where one is no longer null."""
    generator = np.random.default_rng(1)
    each, joint, one_sided = [], [], []
    for _ in range(400):
        both = np.sqrt(1 - dependence) * generator.normal(size=(40, 2))
        both += np.sqrt(dependence) * generator.normal(size=(40, 1))
        p, apart = joint_p_values(both[:1], both[1:], zero_is_nothing=[False, False])
        each.append(apart[0])
        joint.append(p[0])
        both[0, 1] = 99.0  # an influence found, and a loss as among controls
        one_sided.append(joint_p_values(both[:1], both[1:], zero_is_nothing=[False, True])[0][0])
    for found in (*np.array(each).T, np.array(one_sided)):
        spread = found - generator.random(400) / 40  # p is on a grid of 1/40: over its cells evenly
        assert kstest(spread, "uniform").pvalue > 0.01
    assert np.mean(np.array(joint) <= 0.05) < 0.08


def test_both_sides_are_needed() -> None:
    generator = np.random.default_rng(2)
    controls = np.abs(generator.normal(size=(199, 2)))
    items = np.array([[9.0, 9.0], [9.0, 0.5], [0.5, 9.0]])
    p, each = joint_p_values(items, controls, zero_is_nothing=[False, True])
    assert p[0] == 1 / 200 and (p[1:] > 0.2).all() and each[1, 0] == each[2, 1] == 1 / 200


def test_zeros_are_never_evidence() -> None:
    """An influence of zero says nothing even where the controls' are below zero or zero as well."""
    controls = np.stack([np.linspace(0, 1, 99), np.where(np.arange(99) < 50, 0.0, -1.0)], axis=1)
    p, each = joint_p_values(np.array([[2.0, 0.0]]), controls, zero_is_nothing=[False, True])
    assert p[0] == 1 and each[0, 0] == 1 / 100
    p, _ = joint_p_values(np.array([[2.0, 0.0]]), controls, zero_is_nothing=[False, False])
    assert p[0] == pytest.approx((1 + 25) / 100)  # what its mid-rank would have been


@settings(deadline=None, max_examples=50)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=40))
def test_q_as_scipy(p: list[float]) -> None:
    np.testing.assert_allclose(benjamini_hochberg(np.array(p)), false_discovery_control(p), atol=1e-12)


def test_fewest_controls_let_one_item_through() -> None:
    m = fewest_controls(37, 0.05)
    assert 37 / (m + 1) < 0.05 and 37 / (m - 1) > 0.05
