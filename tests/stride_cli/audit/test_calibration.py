"""p-values: uniform where nothing is going on, mid-ranks for ties, zeros never evidence; q against SciPy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import false_discovery_control, kstest, rankdata

from stride_cli.audit.calibration import (
    benjamini_hochberg,
    fewest_controls,
    fewest_together,
    grouped_q_values,
    joint_p_values,
    leave_one_out_p_values,
    p_values,
)

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


def test_each_item_among_the_others() -> None:
    generator = np.random.default_rng(3)
    values = generator.permutation(40).astype(float)
    p, each = leave_one_out_p_values(values[:, None], zero_is_nothing=[False])
    np.testing.assert_allclose(p, (40 - values) / 40)  # ranks: from 1 / N to 1
    np.testing.assert_array_equal(p, each[:, 0])
    assert benjamini_hochberg(p).min() == 1  # no item can stand out from those like it
    nothing = leave_one_out_p_values(np.zeros((0, 2)), zero_is_nothing=[True, True])
    assert [len(found) for found in nothing] == [0, 0]


def test_leave_one_out_is_what_it_says() -> None:
    values = np.random.default_rng(5).integers(-1, 4, size=(25, 2)).astype(float)
    p, each = leave_one_out_p_values(values, zero_is_nothing=[False, True])
    for row in range(25):
        others = np.delete(values, row, axis=0)
        expected, apart = joint_p_values(values[row : row + 1], others, zero_is_nothing=[False, True])
        np.testing.assert_allclose(each[row], apart[0])
        assert p[row] == pytest.approx(expected[0])


def test_groups_do_not_pay_for_each_other() -> None:
    p = np.array([0.01, 0.02, *np.linspace(0.03, 1, 98)])
    few = np.arange(100) < 2
    q = grouped_q_values(p, few)
    np.testing.assert_allclose(q[few], benjamini_hochberg(p[few]))
    np.testing.assert_allclose(q[~few], benjamini_hochberg(p[~few]))
    assert q[:2].max() < 0.05 < benjamini_hochberg(p).min()


@pytest.mark.parametrize("kind", ["file", "absent"])
def test_false_discoveries_stay_under_the_rate(kind: str) -> None:
    """Items that share their controls: half of 30 present ones learnt, the rest and 200 absent ones not.

    The other side of the evidence, the influence, is given to every present item: as for copies that the
    model was not trained on.
    """
    generator = np.random.default_rng(4)
    shares, found = [], []
    present = np.arange(230) < 30
    for _ in range(300):
        loss = generator.normal(size=(530, 1))
        loss[:15] += 4
        both = np.concatenate([loss, np.abs(generator.normal(size=(530, 1)))], axis=1)
        both[:30, 1] += 9
        controls = both[230:] if kind == "file" else both[30:230]
        p, _ = joint_p_values(both[:230], controls, zero_is_nothing=[False, True])
        if kind == "absent":
            p[~present], _ = leave_one_out_p_values(both[30:230], zero_is_nothing=[False, True])
        hits = grouped_q_values(p, present) < 0.05
        shares.append(hits[15:].sum() / max(1, hits.sum()))
        found.append(hits[:15].mean())
    assert np.mean(shares) < 0.05 and np.mean(found) > 0.9


def test_fewest_controls_let_one_item_through() -> None:
    m = fewest_controls(37, 0.05)
    assert 37 / (m + 1) < 0.05 and 37 / (m - 1) > 0.05


@pytest.mark.parametrize(("items", "controls"), [(36, 100), (3, 24), (400, 9)])
def test_so_many_together_are_discovered_and_one_less_is_not(items: int, controls: int) -> None:
    def discovered(count: int) -> int:
        p = np.ones(items)
        p[:count] = 1 / (controls + 1)
        return int((benjamini_hochberg(p) < 0.05).sum())

    enough = fewest_together(items, controls, 0.05)
    assert discovered(min(enough - 1, items)) == 0
    if enough <= items:
        assert discovered(enough) == enough
