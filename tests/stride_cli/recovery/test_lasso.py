"""The Lasso against scikit-learn, against its own optimality conditions, and on inputs that break solvers."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Callable

import numba
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import Lasso

from stride_cli.errors import NumericalError, UsageError
from stride_cli.recovery import problem as one_problem
from stride_cli.recovery import screening
from stride_cli.recovery.lasso import Solution, solve_batch, solve_lasso
from stride_cli.recovery.problem import LassoSettings, Prior

PROBLEMS = settings(max_examples=60, deadline=None)


def regular_columns(rng: np.random.Generator, n: int, n_subsets: int, degree: int) -> np.ndarray:
    order = rng.random((n, n_subsets)).argsort(axis=1)[:, :degree]
    return np.sort(order, axis=1).astype(np.uint16)


def dense(columns: np.ndarray, n_subsets: int) -> np.ndarray:
    matrix = np.zeros((n_subsets, len(columns)))
    matrix[columns.T, np.arange(len(columns))] = 1.0
    return matrix


def weights_of(solution: Solution) -> np.ndarray:
    weights = np.zeros(solution.n_chunks)
    weights[solution.indices] = solution.values
    return weights


def objective(matrix, y, weights, intercept, lambda_) -> float:
    residual = y - intercept - matrix @ weights
    return 0.5 * residual @ residual + lambda_ * np.abs(weights).sum()


@st.composite
def problem(draw: Callable) -> dict:
    """A small problem of any shape: n below and far above K, d from 1 to K, twins, any penalty."""
    n_subsets = draw(st.integers(2, 24))
    degree = draw(st.integers(1, n_subsets))
    n = draw(st.integers(1, 120))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    columns = regular_columns(rng, n, n_subsets, degree)
    if draw(st.booleans()):
        columns = columns[rng.integers(0, n, n)]
    return {
        "columns": columns,
        "y": rng.normal(size=n_subsets) + draw(st.sampled_from([0.0, 10.0])),
        "n_subsets": n_subsets,
        "intercept": draw(st.booleans()),
        "nonneg": draw(st.booleans()),
        "lambda_ratio": draw(st.sampled_from([0.95, 0.5, 0.1, 0.01, 0.001])),
    }


def solve(case: dict, **changed) -> Solution:
    names = ("lambda_ratio", "intercept", "nonneg")
    settings = LassoSettings(**{name: case[name] for name in names} | changed)
    return solve_lasso(case["columns"], case["y"], settings, n_subsets=case["n_subsets"])


@PROBLEMS
@given(problem())
def test_agrees_with_scikit_learn(case):
    solution = solve(case, tolerance=1e-10)
    matrix, y = dense(case["columns"], case["n_subsets"]), case["y"]
    if solution.lambda_ == 0.0:  # nothing correlates: any λ gives w = 0
        assert not len(solution.indices)
        return
    reference = Lasso(
        alpha=solution.lambda_ / case["n_subsets"],
        fit_intercept=case["intercept"],
        positive=case["nonneg"],
        tol=1e-14,
        max_iter=100_000,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        reference.fit(matrix, y)
    ours = objective(matrix, y, weights_of(solution), solution.intercept, solution.lambda_)
    theirs = objective(matrix, y, reference.coef_, reference.intercept_, solution.lambda_)
    scale = 0.5 * y @ y
    assert ours <= theirs + 1e-9 * scale
    if reference.dual_gap_ * case["n_subsets"] <= 1e-9 * scale:
        assert ours == pytest.approx(theirs, abs=1e-8 * scale)
        # the fit is unique even where w is not (twins, n > K)
        fitted = solution.intercept + matrix @ weights_of(solution)
        np.testing.assert_allclose(fitted, reference.predict(matrix), atol=2e-4 * np.sqrt(scale))


@PROBLEMS
@given(problem())
def test_optimality_conditions_hold_for_every_column(case):
    solution = solve(case, tolerance=1e-12)
    matrix, y, weights = dense(case["columns"], case["n_subsets"]), case["y"], weights_of(solution)
    residual = y - solution.intercept - matrix @ weights
    np.testing.assert_allclose(solution.residual, residual, atol=1e-10)
    slack = 2e-5 * max(1.0, np.linalg.norm(y))
    if case["intercept"]:
        assert residual.sum() == pytest.approx(0.0, abs=1e-9)  # the derivative by b
    else:
        assert solution.intercept == 0.0
    slope = matrix.T @ residual
    lambda_ = solution.lambda_
    assert (slope <= lambda_ + slack).all()
    np.testing.assert_allclose(slope[weights > 0], lambda_, atol=slack)
    if case["nonneg"]:
        assert (weights >= 0).all()
    else:
        assert (slope >= -lambda_ - slack).all()
        np.testing.assert_allclose(slope[weights < 0], -lambda_, atol=slack)


@st.composite
def expected(draw: Callable) -> tuple[dict, Prior]:
    """A problem with estimates of its weights: some exact, some (with twins in the design) alike."""
    case = draw(problem())
    n = len(case["columns"])
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    means = rng.normal(size=n) * draw(st.sampled_from([0.0, 0.1, 1.0, 100.0]))
    spreads = rng.choice([0.0, 0.25, 1.0, 4.0], n) * draw(st.sampled_from([1e-6, 1.0]))
    return case, Prior(means, spreads)


def of_one_unit(prior: Prior) -> np.ndarray:
    """1 / ω (n,), as the solver rounds it."""
    return (prior.spreads / (prior.spreads.max() or 1.0)).astype(np.float32).astype(np.float64)


@PROBLEMS
@given(expected())
def test_weights_near_their_estimates_agree_with_scikit_learn(given_):
    """With u = ω (w − μ) it is a Lasso over columns M / ω for y − M μ; what is exact has no column."""
    case, prior = given_
    settings = LassoSettings(case["lambda_ratio"], case["intercept"], tolerance=1e-10)
    found = solve_lasso(case["columns"], case["y"], settings, n_subsets=case["n_subsets"], prior=prior)
    matrix, weights = dense(case["columns"], case["n_subsets"]), weights_of(found)
    unit = of_one_unit(prior)
    np.testing.assert_array_equal(weights[unit == 0], prior.means[unit == 0])
    left = case["y"] - matrix @ prior.means
    np.testing.assert_allclose(
        found.residual, left - matrix @ (weights - prior.means) - found.intercept, atol=1e-8 * np.ptp(left)
    )
    free = unit > 0
    if not found.lambda_ or not free.any():
        np.testing.assert_array_equal(weights, prior.means)
        return
    reference = Lasso(
        found.lambda_ / case["n_subsets"], fit_intercept=case["intercept"], tol=1e-14, max_iter=100_000
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        reference.fit(matrix[:, free] * unit[free], left)
    moved = (weights - prior.means)[free] / unit[free]
    scaled = matrix[:, free] * unit[free]
    ours = objective(scaled, left, moved, found.intercept, found.lambda_)
    theirs = objective(scaled, left, reference.coef_, reference.intercept_, found.lambda_)
    size = 0.5 * left @ left
    assert ours <= theirs + 1e-8 * size
    if reference.dual_gap_ * case["n_subsets"] <= 1e-9 * size:
        assert ours == pytest.approx(theirs, abs=1e-7 * size)


@PROBLEMS
@given(expected())
def test_weights_that_may_not_be_negative_are_optimal_column_by_column(given_):
    case, prior = given_
    settings = LassoSettings(case["lambda_ratio"], case["intercept"], nonneg=True, tolerance=1e-12)
    found = solve_lasso(case["columns"], case["y"], settings, n_subsets=case["n_subsets"], prior=prior)
    matrix, weights = dense(case["columns"], case["n_subsets"]), weights_of(found)
    unit, means = of_one_unit(prior), np.maximum(prior.means, 0.0)
    assert (weights >= 0).all()
    slope = unit * (matrix.T @ found.residual)  # of what one unit of each chunk gains
    lambda_, size = found.lambda_, np.linalg.norm(case["y"] - matrix @ means)
    slack = 2e-5 * max(size, lambda_)
    free = (unit > 0) & (lambda_ < found.lambda_max)
    near = np.abs(weights - means) <= 1e-6 * max(1e-9, means.max())
    # where a weight could rise, no more is gained than λ; where it has risen, just λ
    assert (slope[free] <= lambda_ + slack).all()
    np.testing.assert_allclose(slope[free & (weights > means) & ~near], lambda_, atol=slack)
    # the same downwards, but for weights that are zero: these can fall no further
    between = free & (weights > 1e-6 * max(1e-9, means.max()))
    assert (slope[between] >= -lambda_ - slack).all()
    np.testing.assert_allclose(slope[between & (weights < means) & ~near], -lambda_, atol=slack)


def test_the_certificate_bounds_the_distance_to_the_minimum_with_estimates(rng):
    columns = regular_columns(rng, 20_000, 60, 4)
    y, prior = rng.normal(size=60), Prior(rng.normal(size=20_000) / 50, rng.uniform(0, 1, 20_000))
    for nonneg in (False, True):
        loose, tight = (
            solve_lasso(
                columns, y, LassoSettings(0.05, nonneg=nonneg, tolerance=each), n_subsets=60, prior=prior
            )
            for each in (1e-2, 1e-11)
        )
        matrix, unit = dense(columns, 60), of_one_unit(prior)
        means = np.maximum(prior.means, 0) if nonneg else prior.means
        values = [
            0.5 * each.residual @ each.residual
            + each.lambda_ * (np.abs(weights_of(each) - means)[unit > 0] / unit[unit > 0]).sum()
            for each in (loose, tight)
        ]
        assert -1e-6 <= values[0] - values[1] <= loose.duality_gap * (1 + 1e-6)
        np.testing.assert_allclose(
            tight.residual, y - tight.intercept - matrix @ weights_of(tight), atol=1e-4 if nonneg else 1e-9
        )


@PROBLEMS
@given(problem())
def test_certificate_bounds_the_distance_to_the_minimum(case):
    loose = solve(case, tolerance=1e-2)
    tight = solve(case, tolerance=1e-13)
    matrix, y = dense(case["columns"], case["n_subsets"]), case["y"]
    values = [objective(matrix, y, weights_of(s), s.intercept, s.lambda_) for s in (loose, tight)]
    assert values[0] - values[1] <= loose.duality_gap + 1e-9 * (y @ y)
    assert loose.relative_gap <= 1e-2 and tight.relative_gap <= 1e-13


@pytest.mark.parametrize("seed", [0, 72, 157, 169])
def test_a_tight_certificate_comes_where_newton_steps_crawl(seed):
    """More columns than subsets, all nearly aligned with y: many w explain as much, to all digits.

    Without solving for the support's weights, one such problem in 70 did not end.
    """
    rng = np.random.default_rng(seed)
    columns = regular_columns(rng, 43, 16, 8)
    y = rng.normal(size=16) + 10
    case = {"columns": columns, "y": y, "n_subsets": 16, "intercept": False, "lambda_ratio": 0.5}
    for nonneg in (False, True):
        assert solve(case | {"nonneg": nonneg}, tolerance=1e-13).relative_gap <= 1e-13


@PROBLEMS
@given(problem())
def test_lambda_max_is_where_weights_vanish(case):
    at = solve(case, lambda_ratio=1.0)
    assert not len(at.indices) and at.relative_gap == 0.0 and at.n_passes <= 1
    if at.lambda_max > 0:
        below = solve(case, lambda_ratio=1 - 1e-4, tolerance=1e-14)
        assert len(below.indices)


@PROBLEMS
@given(problem(), st.integers(0, 1000))
def test_twins_share_evenly_whatever_their_order(case, seed):
    order = np.random.default_rng(seed).permutation(len(case["columns"]))
    columns = case["columns"]
    first = weights_of(solve(case, tolerance=1e-11))
    second = np.empty(len(order))
    second[order] = weights_of(solve(case | {"columns": columns[order]}, tolerance=1e-11))
    # w need not be unique (n > K), what it explains is
    matrix = dense(columns, case["n_subsets"])
    centred = matrix - matrix.mean(axis=0) if case["intercept"] else matrix
    atol = 1e-5 * max(1.0, np.linalg.norm(case["y"]))  # a gap g leaves √(2 g) of M w open
    np.testing.assert_allclose(centred @ second, centred @ first, atol=atol)
    _, group = np.unique(columns, axis=0, return_inverse=True)
    for twins in range(group.max() + 1):
        assert len(set(first[group.ravel() == twins])) == len(set(second[group.ravel() == twins])) == 1


@pytest.mark.parametrize("nonneg", [False, True])
def test_disjoint_columns_are_soft_thresholded(nonneg, rng):
    columns = np.arange(40).reshape(10, 4).astype(np.uint16)  # no two share a subset
    y = rng.normal(size=40)
    products = y.reshape(10, 4).sum(axis=1)
    largest = float((products if nonneg else np.abs(products)).max())
    solution = solve_lasso(
        columns,
        y,
        LassoSettings(lambda_ratio=0.5 / largest, intercept=False, nonneg=nonneg, tolerance=1e-14),
        n_subsets=40,
    )
    expected = np.sign(products) * np.maximum(np.abs(products) - 0.5, 0) / 4
    if nonneg:
        expected = np.maximum(expected, 0)
    np.testing.assert_allclose(weights_of(solution), expected, atol=1e-7)


@pytest.mark.parametrize("intercept", [False, True])
def test_planted_weights_come_back(intercept, rng):
    n, n_subsets = 20_000, 500
    columns = regular_columns(rng, n, n_subsets, 10)
    planted = rng.choice(n, 10, replace=False)
    weights = np.zeros(n)
    weights[planted] = rng.choice([-1, 1], 10) * rng.uniform(1, 3, 10)
    y = np.bincount(columns[planted].ravel(), np.repeat(weights[planted], 10), minlength=n_subsets)
    y += 5.0 * intercept + 0.02 * rng.normal(size=n_subsets)
    solution = solve_lasso(
        columns, y, LassoSettings(lambda_ratio=0.1, intercept=intercept), n_subsets=n_subsets
    )
    found = weights_of(solution)
    assert set(np.argsort(-np.abs(found))[:10]) == set(planted)
    np.testing.assert_array_equal(np.sign(found[planted]), np.sign(weights[planted]))
    np.testing.assert_allclose(found[planted], weights[planted], atol=0.45)  # shrunk by about λ / d
    assert solution.r_squared > 0.95 and solution.n_passes <= 4
    if intercept:
        assert solution.intercept == pytest.approx(5.0, abs=0.1)


@pytest.fixture
def wide(rng) -> tuple[np.ndarray, np.ndarray]:
    columns = regular_columns(rng, 60_000, 100, 5)  # more columns than one scan collects
    return columns, rng.normal(size=100)


def test_same_answer_for_shards_threads_and_memory_maps(wide, tmp_path):
    columns, y = wide
    whole = solve_lasso(columns, y, LassoSettings(lambda_ratio=0.3, tolerance=1e-13), n_subsets=100)
    np.save(tmp_path / "part.npy", columns[:41_234])
    shards = [np.load(tmp_path / "part.npy", mmap_mode="r"), columns[41_234:41_235], columns[41_235:]]
    for other, threads in (
        (shards, 1),
        (shards, 2),
        (columns.astype(np.uint32), 2),
        (columns.astype(int), 1),
    ):
        before = numba.get_num_threads()
        numba.set_num_threads(min(threads, before))
        solution = solve_lasso(other, y, LassoSettings(lambda_ratio=0.3, tolerance=1e-13), n_subsets=100)
        numba.set_num_threads(before)
        np.testing.assert_array_equal(solution.indices, whole.indices)
        np.testing.assert_allclose(solution.values, whole.values, atol=1e-7)


@pytest.mark.parametrize("exponent", [-150, -9, -6, 6, 9, 150])
def test_scale_of_y_only_scales_the_answer(wide, exponent):
    columns, y = wide
    plain = solve_lasso(columns, y, LassoSettings(lambda_ratio=0.5), n_subsets=100)
    scaled = solve_lasso(columns, y * 10.0**exponent, LassoSettings(lambda_ratio=0.5), n_subsets=100)
    np.testing.assert_array_equal(scaled.indices, plain.indices)
    np.testing.assert_allclose(scaled.values * 10.0**-exponent, plain.values, rtol=1e-5)
    assert scaled.lambda_max == pytest.approx(plain.lambda_max * 10.0**exponent)


# single scans; a full batch of 64 and a part of one
@pytest.mark.parametrize("count", [2, pytest.param(70, marks=pytest.mark.slow)])
def test_batch_equals_separate_solutions(wide, count, rng, monkeypatch):
    monkeypatch.setattr(screening, "_SHARED_COLUMNS", 0)
    columns, _ = wide
    measurements = rng.normal(size=(count, 100)) * 10.0 ** rng.integers(-3, 3, (count, 1))
    measurements[1] = 7.0
    for nonneg in (False, True):
        batch = solve_batch(
            columns,
            measurements,
            LassoSettings(lambda_ratio=0.4, nonneg=nonneg, tolerance=1e-12),
            n_subsets=100,
        )
        assert not len(batch[1].indices)
        for y, together in zip(measurements[:3], batch, strict=False):
            alone = solve_lasso(
                columns, y, LassoSettings(lambda_ratio=0.4, nonneg=nonneg, tolerance=1e-12), n_subsets=100
            )
            np.testing.assert_array_equal(together.indices, alone.indices)
            np.testing.assert_array_equal(together.values, alone.values)


def gap_over_all(columns, solution: Solution, y: np.ndarray) -> float:
    """Relative duality gap by the dense matrix, every column looked at."""
    matrix = dense(columns, len(y))
    target, residual = y - y.mean(), solution.residual
    weights = np.abs(solution.values).sum()
    scale = min(1.0, solution.lambda_ / np.abs(matrix.T @ residual).max())
    dual = scale * target @ residual - 0.5 * scale**2 * residual @ residual
    return (0.5 * residual @ residual + solution.lambda_ * weights - dual) / (0.5 * target @ target)


@pytest.mark.parametrize(("ratio", "collect"), [(0.9, 6), (0.8, 30), (0.7, 90), (0.3, 30)])
@pytest.mark.parametrize("twins", [False, True])
def test_one_pass_may_prove_the_gap_but_never_wrongly(ratio, collect, twins, rng, monkeypatch):
    """With few columns collected, those left out often come to violate optimality: then a pass finds them."""
    monkeypatch.setattr(one_problem, "_COLLECT", (collect, collect))
    monkeypatch.setattr(one_problem, "_COLLECT_SUBSETS", 0)
    passes = []
    for _ in range(60):
        columns = regular_columns(rng, 300, 24, 5)
        if twins:
            columns = np.concatenate([columns[:150], columns[:150]])
        y = rng.normal(size=24) + 3.0 * (rng.random(24) < 0.1)
        solution = solve_lasso(columns, y, LassoSettings(lambda_ratio=ratio), n_subsets=24)
        gap = gap_over_all(columns, solution, y)
        assert gap <= solution.relative_gap + 1e-12 <= 1e-6 + 1e-12
        if twins:
            weights = weights_of(solution)
            np.testing.assert_array_equal(weights[:150], weights[150:])
        passes.append(solution.n_passes)
    assert max(passes) > 1 or ratio == 0.7
    assert (min(passes) == 1) == (ratio > 0.5)


def test_a_column_left_out_that_comes_to_violate_is_found(monkeypatch):
    """It scores .1 at first, and 2.3 once the column it shares four subsets with has its weight; λ is 2."""
    monkeypatch.setattr(one_problem, "_COLLECT", (2, 2))
    monkeypatch.setattr(one_problem, "_COLLECT_SUBSETS", 0)
    columns = np.array([[0, 1, 2, 3, 4], [0, 1, 2, 3, 9], [10, 11, 12, 13, 14]], np.uint16)
    y = np.zeros(15)
    y[:5], y[9], y[10:] = 1.0, -3.9, 0.38
    solution = solve_lasso(
        columns,
        y,
        LassoSettings(lambda_ratio=2.0 / np.abs(dense(columns, 15).T @ y).max(), intercept=False),
        n_subsets=15,
    )
    assert solution.n_passes >= 2 and solution.indices.tolist() == [0, 1]
    slope = np.abs(dense(columns, 15).T @ solution.residual)
    np.testing.assert_allclose(slope, [2.0, 2.0, 1.9], atol=1e-3)


def test_usual_problems_at_large_lambda_take_one_pass(rng):
    columns = regular_columns(rng, 60_000, 100, 5)
    for _ in range(5):
        y = rng.normal(size=100)
        y[columns[rng.integers(60_000)]] += 3.0
        solution = solve_lasso(columns, y, LassoSettings(lambda_ratio=0.8), n_subsets=100)
        assert solution.n_passes == 1 and len(solution.indices)
        assert gap_over_all(columns, solution, y) <= 1e-6


class TestDegenerate:
    @pytest.mark.parametrize("intercept", [False, True])
    def test_zero_measurements(self, rng, intercept):
        solution = solve_lasso(
            regular_columns(rng, 30, 8, 3), np.zeros(8), LassoSettings(intercept=intercept), n_subsets=8
        )
        assert len(solution.indices) == 0 and solution.lambda_max == 0.0 and solution.n_passes == 0
        assert solution.duality_gap == solution.relative_gap == solution.r_squared == 0.0

    @pytest.mark.parametrize("constant", [3.0, 0.1, -1e9])
    def test_constant_measurements_are_the_intercept(self, rng, constant):
        solution = solve_lasso(regular_columns(rng, 30, 7, 3), np.full(7, constant), n_subsets=7)
        assert len(solution.indices) == 0 and solution.lambda_max == 0.0
        assert solution.intercept == pytest.approx(constant)

    def test_every_chunk_in_every_subset(self, rng):
        columns = np.tile(np.arange(6, dtype=np.uint16), (20, 1))
        y = rng.normal(size=6)
        assert not len(solve_lasso(columns, y, n_subsets=6).indices)  # centred columns are zero
        plain = solve_lasso(columns, y, LassoSettings(intercept=False, tolerance=1e-14), n_subsets=6)
        assert plain.values == pytest.approx(np.full(20, 0.9 * y.mean() / 20))

    def test_empty_subsets_and_fewer_chunks_than_subsets(self, rng):
        columns = np.array([[0, 1], [2, 3], [1, 3]], dtype=np.uint16)
        y = rng.normal(size=50)
        solution = solve_lasso(columns, y, LassoSettings(lambda_ratio=0.01, tolerance=1e-12), n_subsets=50)
        reference = Lasso(alpha=solution.lambda_ / 50, tol=1e-14).fit(dense(columns, 50), y)
        np.testing.assert_allclose(weights_of(solution), reference.coef_, atol=1e-6)

    def test_no_chunk_correlates_positively(self):
        columns = np.array([[0, 1], [0, 2]], dtype=np.uint16)
        y = np.array([-5.0, -1, -1, 3, 4])
        solution = solve_lasso(columns, y, LassoSettings(nonneg=True), n_subsets=5)
        assert solution.lambda_max == 0.0 and not len(solution.indices) and solution.relative_gap == 0.0

    @pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
    def test_measurement_that_is_not_finite(self, rng, value):
        measurements = np.zeros((3, 9))
        measurements[2, 5] = value
        with pytest.raises(NumericalError, match=r"y\[5\] of query 2"):
            solve_batch(regular_columns(rng, 30, 9, 3), measurements, n_subsets=9)

    def test_many_chunks_in_few_subsets(self, rng):
        """A hundred thousand chunks, ten distinct columns: a scan cannot keep all that matter at first."""
        columns = regular_columns(rng, 100_000, 5, 2)
        y = rng.normal(size=5)
        solution = solve_lasso(columns, y, LassoSettings(lambda_ratio=0.2, tolerance=1e-12), n_subsets=5)
        weights = weights_of(solution)
        distinct, group, count = np.unique(columns, axis=0, return_inverse=True, return_counts=True)
        sums = np.bincount(group.ravel(), weights)
        small = solve_lasso(distinct, y, LassoSettings(lambda_ratio=0.2, tolerance=1e-12), n_subsets=5)
        np.testing.assert_allclose(weights, (sums / count)[group.ravel()], atol=1e-12)
        fitted = dense(distinct, 5) @ sums + solution.intercept
        expected = dense(distinct, 5) @ weights_of(small) + small.intercept
        np.testing.assert_allclose(fitted, expected, atol=1e-5)

    def test_one_chunk(self):
        solution = solve_lasso(
            np.array([[1]], dtype=np.uint16),
            np.array([0.0, 4.0]),
            LassoSettings(lambda_ratio=0.5),
            n_subsets=2,
        )
        assert solution.indices.tolist() == [0] and solution.r_squared == pytest.approx(0.75)

    def test_no_chunks(self):
        solution = solve_lasso(np.empty((0, 2), np.uint16), np.arange(4.0), n_subsets=4)
        assert solution.n_chunks == 0 and not len(solution.indices)

    def test_subset_number_out_of_range(self, rng):
        columns = regular_columns(rng, 300, 9, 3)
        columns[123, 2] = 9
        with pytest.raises(NumericalError, match="subset that does not exist") as caught:
            solve_lasso(columns, rng.normal(size=9), n_subsets=9)
        assert "stride index verify" in str(caught.value.fix)
        with pytest.raises(NumericalError, match="subset that does not exist"):
            solve_batch(columns, rng.normal(size=(5, 9)), n_subsets=9)
        with pytest.raises(UsageError, match=r"names? subset"):
            solve_lasso(columns.astype(np.uint32), rng.normal(size=9), n_subsets=9)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"n_subsets": 10}, r"shape \(1, 9\)"),
            ({"n_subsets": 2}, "3 subsets each, of 2"),
            ({"columns": np.zeros((4, 3))}, "2-D array of integers"),
            ({"columns": []}, "no columns"),
        ],
    )
    def test_arguments_that_cannot_work(self, rng, change, message):
        arguments = {
            "columns": regular_columns(rng, 30, 9, 3),
            "y": rng.normal(size=9),
            "n_subsets": 9,
        } | change
        with pytest.raises(UsageError, match=message):
            solve_lasso(**arguments)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"lambda_ratio": 0.0}, "λ / λ_max is 0.0"),
            ({"lambda_ratio": np.nan}, "λ / λ_max is nan"),
            ({"tolerance": 0.0}, "tolerance is 0.0"),
        ],
    )
    def test_settings_that_cannot_work(self, change, message):
        with pytest.raises(UsageError, match=message):
            LassoSettings(**change)

    def test_unreached_tolerance_is_an_error(self, wide):
        columns, y = wide
        with pytest.raises(NumericalError, match="did not reach") as caught:
            solve_lasso(columns, y, LassoSettings(lambda_ratio=0.01, max_epochs=3), n_subsets=100)
        assert caught.value.fix


@pytest.mark.slow
def test_two_python_threads_may_solve_at_once():
    """numba's workqueue layer ends the process when two threads enter it together."""
    code = (
        "import numpy as np\n"
        "from concurrent.futures import ThreadPoolExecutor\n"
        "from stride_cli.recovery.lasso import solve_lasso\n"
        "from stride_cli.recovery.problem import LassoSettings\n"
        "half = LassoSettings(lambda_ratio=0.5)\n"
        "rng = np.random.default_rng(0)\n"
        "columns = np.sort(rng.random((50_000, 40)).argsort(axis=1)[:, :4], axis=1).astype(np.uint16)\n"
        "solve = lambda y: solve_lasso(columns, y, half, n_subsets=40).lambda_max\n"
        "print(len(list(ThreadPoolExecutor(4).map(solve, rng.normal(size=(40, 40))))))\n"
    )
    environment = os.environ | {"NUMBA_THREADING_LAYER": "workqueue", "NUMBA_NUM_THREADS": "2"}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "40"
