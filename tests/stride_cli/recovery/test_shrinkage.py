"""Shrinkage of recovered weights."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from index_format.design import build_columns
from stride_cli.recovery.lasso import solve_lasso
from stride_cli.recovery.problem import LassoSettings
from stride_cli.recovery.shrinkage import Shrinkage, shrink, shrink_solution
from stride_cli.research.evaluation.metrics import predicted_response

HOW = Shrinkage(exponent=1.3, opposing=0.15)
WEIGHTS = arrays(np.float64, st.integers(1, 30), elements=st.floats(-1e6, 1e6, allow_subnormal=False))


@given(WEIGHTS)
def test_order_within_a_sign_stays_and_nothing_grows(weights):
    found = shrink(weights, HOW)
    assert (np.abs(found) <= np.abs(weights) * (1 + 1e-12)).all()
    assert (found * weights >= 0.0).all()
    for sign in (1, -1):
        own = sign * weights > 0
        order = np.argsort(sign * weights[own], kind="stable")
        assert (np.diff((sign * found[own])[order]) >= 0.0).all()


@given(WEIGHTS, st.floats(1e-3, 1e3))
def test_the_unit_does_not_matter(weights, unit):
    np.testing.assert_allclose(
        shrink(unit * weights, HOW), unit * shrink(weights, HOW), rtol=1e-9, atol=1e-300
    )


def test_values():
    found = shrink(np.array([[8.0, 4.0, -4.0, 0.0], [0.0, 0.0, 0.0, 0.0]]), Shrinkage(2.0, 0.5))
    np.testing.assert_allclose(found, [[8.0, 2.0, -1.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    same = np.array([3.0, -1.0])
    np.testing.assert_array_equal(shrink(same, Shrinkage(1.0, 1.0)), same)
    assert shrink(np.zeros((2, 0)), HOW).shape == (2, 0)


def test_a_solution_keeps_the_certificate_of_its_lasso():
    columns = build_columns(0, 300, n_subsets=60, degree=4, seed=1)
    y = np.random.default_rng(0).normal(size=60)
    found = solve_lasso(columns, y, LassoSettings(lambda_ratio=0.2), n_subsets=60)
    shrunk = shrink_solution(found, HOW)
    assert shrink_solution(found, None) is found
    np.testing.assert_array_equal(shrunk.indices, found.indices)
    np.testing.assert_allclose(shrunk.values, shrink(found.values, HOW))
    assert (shrunk.duality_gap, shrunk.r_squared) == (found.duality_gap, found.r_squared)
    np.testing.assert_array_equal(shrunk.residual, found.residual)
    # it is towards the average chunk
    moved = replace(found, values=found.values + 3.0, average=3.0)
    np.testing.assert_allclose(shrink_solution(moved, HOW).values, shrunk.values + 3.0)


def test_few_large_influences_under_noise_are_predicted_better():
    """What it is for: sums over random halves, when most weights are noise and few effects are real."""
    random = np.random.default_rng(3)
    truth = np.zeros((20, 2000))
    for row in truth:
        row[random.choice(2000, 20, replace=False)] = random.exponential(size=20)
    noisy = truth + random.normal(scale=0.15, size=truth.shape)
    masks = random.random((200, 2000)) < 0.5
    target = predicted_response(truth, masks)

    def agreement(scores):
        predicted = predicted_response(scores, masks)
        return np.mean([np.corrcoef(a, b)[0, 1] for a, b in zip(predicted, target, strict=True)])

    assert agreement(shrink(noisy, HOW)) > agreement(noisy) + 0.05


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_where_the_largest_opposes_it_sets_the_scale_too(sign):
    found = shrink(np.array([sign * 4.0, 1.0]), Shrinkage(2.0, 1.0))
    np.testing.assert_allclose(found, [sign * 4.0, 0.25])


def test_each_query_is_shrunk_by_its_own_largest_weight():
    queries = np.random.default_rng(2).normal(size=(4, 9)) * np.array([[1e-3], [1.0], [50.0], [0.0]])
    alone = np.stack([shrink(row, HOW) for row in queries])
    np.testing.assert_array_equal(shrink(queries, HOW), alone)
