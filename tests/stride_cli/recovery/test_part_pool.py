"""The Lasso on some of the subsets, against scikit-learn on the dense matrix of those rows."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import Lasso

from stride_cli.errors import UsageError
from stride_cli.recovery.lasso import Solution, solve_batch, solve_lasso
from stride_cli.recovery.part_pool import descend_part_kernel
from stride_cli.recovery.problem import LassoSettings


def design(seed: int, n: int, n_subsets: int, degree: int) -> tuple[np.ndarray, np.ndarray]:
    """Columns (n, d) and the dense M (K, n)."""
    order = np.random.default_rng(seed).random((n, n_subsets)).argsort(axis=1)[:, :degree]
    columns = np.sort(order, axis=1).astype(np.uint16)
    matrix = np.zeros((n_subsets, n))
    matrix[columns.T, np.arange(n)] = 1.0
    return columns, matrix


def weights_of(solution: Solution) -> np.ndarray:
    weights = np.zeros(solution.n_chunks)
    weights[solution.indices] = solution.values
    return weights


@example(seed=2825, n=4, shape=(3, 1), ratio=0.9, intercept=True, nonneg=False)
@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    n=st.integers(1, 120),
    shape=st.integers(3, 24).flatmap(lambda k: st.tuples(st.just(k), st.integers(1, k))),
    ratio=st.sampled_from([0.9, 0.3, 0.05, 0.005]),
    intercept=st.booleans(),
    nonneg=st.booleans(),
)
def test_half_a_design_agrees_with_scikit_learn_on_its_rows(seed, n, shape, ratio, intercept, nonneg):
    n_subsets, degree = shape
    columns, matrix = design(seed, n, n_subsets, degree)
    rng = np.random.default_rng(seed)
    y = rng.normal(size=n_subsets) + 10.0
    kept = np.zeros(n_subsets, bool)
    kept[rng.permutation(n_subsets)[: n_subsets // 2 + 1]] = True
    found = solve_batch(
        columns,
        y[None],
        LassoSettings(lambda_ratio=ratio, intercept=intercept, nonneg=nonneg, tolerance=1e-10),
        n_subsets=n_subsets,
        kept=kept[None],
    )[0]
    part, target = matrix[kept], y[kept]
    offset = target.mean() if intercept else 0.0
    correlation = part.T @ (target - offset)
    largest = max(0.0, float((correlation if nonneg else np.abs(correlation)).max()))
    assert found.lambda_max == pytest.approx(largest, abs=1e-12)
    if found.lambda_ == 0.0:
        assert not len(found.indices)
        return
    reference = Lasso(
        found.lambda_ / kept.sum(), fit_intercept=intercept, positive=nonneg, tol=1e-14, max_iter=200_000
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        reference.fit(part, target)

    def objective(weights: np.ndarray, b: float) -> float:
        residual = target - b - part @ weights
        return 0.5 * residual @ residual + found.lambda_ * np.abs(weights).sum()

    weights = weights_of(found)
    ours, theirs = objective(weights, found.intercept), objective(reference.coef_, reference.intercept_)
    half = 0.5 * float(((target - offset) ** 2).sum())
    assert ours <= theirs + 2e-10 * half
    assert found.duality_gap <= 1e-10 * half
    # the fit is unique even where the weights are not
    residual = target - found.intercept - part @ weights
    np.testing.assert_allclose(found.residual[kept], residual, atol=1e-8)
    assert not found.residual[~kept].any()
    fits = part @ weights + found.intercept, part @ reference.coef_ + reference.intercept_
    np.testing.assert_allclose(*fits, atol=3e-4 * np.sqrt(2 * half))
    # a chunk in none of the rows is not measured; chunks in the same rows share their weight
    assert not weights[part.sum(axis=0) == 0].any()
    _, group = np.unique(part, axis=1, return_inverse=True)
    for number in range(group.max() + 1):
        assert np.ptp(weights[group.ravel() == number]) <= 1e-12


def test_all_subsets_kept_are_the_whole_problem():
    columns, _ = design(1, 60, 12, 3)
    y = np.random.default_rng(1).normal(size=12)
    whole = solve_lasso(columns, y, n_subsets=12)
    kept = solve_batch(columns, y[None], n_subsets=12, kept=np.ones((1, 12), bool))[0]
    np.testing.assert_array_equal(whole.values, kept.values)
    np.testing.assert_array_equal(whole.indices, kept.indices)


def test_dropped_rows_change_nothing():
    columns, _ = design(2, 60, 12, 3)
    y = np.random.default_rng(2).normal(size=12)
    kept = np.arange(12) % 2 == 0
    other = np.where(kept, y, 1e6)
    first, second = solve_batch(columns, np.stack([y, other]), n_subsets=12, kept=np.stack([kept, kept]))
    np.testing.assert_array_equal(first.values, second.values)
    assert first.intercept == second.intercept


def test_one_row_left_says_nothing_with_an_intercept():
    columns, _ = design(3, 20, 6, 2)
    kept = np.arange(6) == 4
    found = solve_batch(columns, np.ones((1, 6)), n_subsets=6, kept=kept[None])[0]
    assert not len(found.indices) and found.intercept == 1.0


@pytest.mark.parametrize("kept", [np.zeros((1, 6), bool), np.ones((2, 6), bool), np.ones((1, 6))])
def test_rows_that_fit_nothing_are_refused(kept):
    columns, _ = design(4, 20, 6, 2)
    with pytest.raises(UsageError, match="kept"):
        solve_batch(columns, np.ones((1, 6)), n_subsets=6, kept=kept)


@pytest.mark.parametrize("centred", [False, True])
def test_one_coordinate_round_over_one_column_ends_at_its_minimum(centred):
    """The step is exact for the column's length among the rows that are kept."""
    kept = np.array([0, 2, 3, 5, 6])
    residual = np.zeros(8)
    residual[kept] = np.random.default_rng(3).normal(size=len(kept)) * 3
    if centred:
        residual[kept] -= residual[kept].mean()
    target = residual[kept].copy()
    rows, sizes = np.array([[2, 5, 6, 1]], np.uint16), np.array([3])  # row 1 is not kept
    column = np.isin(kept, rows[0, :3]).astype(float)[:, None]
    reference = Lasso(0.4 / len(kept), fit_intercept=centred, tol=1e-14).fit(column, target)
    assert abs(reference.coef_[0]) > 0.1
    weights = np.zeros(1)
    only = np.zeros(1, np.int64)
    epochs = descend_part_kernel(rows, sizes, weights, residual, 0.4, kept, centred, False, only, 1, 0.0)
    assert epochs == 1 and weights[0] == pytest.approx(reference.coef_[0])
    np.testing.assert_allclose(residual[kept], target - reference.predict(column), atol=1e-12)
