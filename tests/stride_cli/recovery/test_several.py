"""Several models' recoveries as one."""

from __future__ import annotations

import numpy as np

from index_format.design import build_columns
from stride_cli.recovery.lasso import solve_lasso
from stride_cli.recovery.problem import LassoSettings
from stride_cli.recovery.several import mean_solution, solve_models

K, N = 24, 60


def problem(count: int) -> tuple[list[np.ndarray], np.ndarray]:
    random = np.random.default_rng(3)
    designs = [build_columns(0, N, n_subsets=K, degree=3, seed=seed) for seed in range(count)]
    weights = np.zeros(N)
    weights[[4, 17, 40]] = [1.0, -0.7, 0.5]
    y = np.concatenate([weights[:, None].repeat(3, 1).ravel() @ _rows(own) for own in designs])
    return designs, np.stack([y + 0.05 * random.normal(size=y.size) for _ in range(2)])


def _rows(columns: np.ndarray) -> np.ndarray:
    """(3 N, K): one row for each entry of the design."""
    rows = np.zeros((columns.size, K))
    rows[np.arange(columns.size), columns.ravel()] = 1
    return rows


def test_one_model_has_the_bits_of_its_own_lasso() -> None:
    designs, y = problem(1)
    (found, _) = solve_models(designs, y, LassoSettings(lambda_ratio=0.1), n_subsets=K)
    alone = solve_lasso(designs[0], y[0], LassoSettings(lambda_ratio=0.1), n_subsets=K)
    assert mean_solution([alone]) is alone
    np.testing.assert_array_equal(found.values, alone.values)
    np.testing.assert_array_equal(found.indices, alone.indices)


def test_several_are_the_mean_of_each_on_its_own() -> None:
    designs, y = problem(3)
    found = solve_models(designs, y, LassoSettings(lambda_ratio=0.1), n_subsets=K)
    for solution, row in zip(found, y, strict=True):
        each = [
            solve_lasso(own, part, LassoSettings(lambda_ratio=0.1), n_subsets=K)
            for own, part in zip(designs, np.split(row, 3), strict=True)
        ]
        expected = np.zeros(N)
        for one in each:
            expected[one.indices] += one.values / 3
        dense = np.zeros(N)
        dense[solution.indices] = solution.values
        np.testing.assert_allclose(dense, expected, rtol=1e-12)
        assert (solution.values != 0).all() and (np.diff(solution.indices) > 0).all()
        assert solution.relative_gap == max(one.relative_gap for one in each)
        assert solution.n_passes == sum(one.n_passes for one in each)
        np.testing.assert_array_equal(solution.residual, np.concatenate([one.residual for one in each]))
        assert solution.indices[np.argmax(solution.values)] == 4
