"""Second opinions from halves of the subsets, on designs whose truth is known."""

from __future__ import annotations

import numpy as np
import pytest

from stride_cli.errors import UsageError
from stride_cli.recovery.lasso import Solution, solve_batch
from stride_cli.recovery.problem import LassoSettings
from stride_cli.recovery.ranking import Hit
from stride_cli.recovery.stability import (
    Halves,
    document_stability,
    draw_halves,
    solve_halves,
    with_stability,
)


def regular_columns(n: int, n_subsets: int, degree: int, seed: int = 0) -> np.ndarray:
    order = np.random.default_rng(seed).random((n, n_subsets)).argsort(axis=1)[:, :degree]
    return np.sort(order, axis=1).astype(np.uint16)


def planted(columns: np.ndarray, n_subsets: int, weights: np.ndarray, noise: float) -> np.ndarray:
    y = np.random.default_rng(5).normal(size=n_subsets) * noise
    np.add.at(y, columns.ravel(), np.repeat(weights, columns.shape[1]))
    return y


def solution(weights: dict[int, float], n: int) -> Solution:
    return Solution(
        indices=np.array(sorted(weights), dtype=np.int64),
        values=np.array([weights[i] for i in sorted(weights)], dtype=np.float64),
        intercept=0.0, lambda_=1.0, lambda_max=2.0, lambda_ratio=0.5, duality_gap=0.0, relative_gap=0.0,
        n_passes=2, n_epochs=3, r_squared=0.5, residual=np.zeros(8), n_chunks=n,
    )  # fmt: skip


@pytest.mark.parametrize("n_subsets", [8, 9])
def test_halves_come_in_pairs_that_share_nothing(n_subsets):
    kept = draw_halves(n_subsets, 5, seed=3)
    assert kept.shape == (5, n_subsets)
    assert (kept[0] ^ kept[1]).all() and (kept[2] ^ kept[3]).all()
    assert not (kept[0] == kept[2]).all()
    assert set(kept.sum(axis=1)) <= {n_subsets // 2, (n_subsets + 1) // 2}
    np.testing.assert_array_equal(draw_halves(n_subsets, 2, seed=3), kept[:2])
    assert not (draw_halves(n_subsets, 5, seed=4) == kept).all()


def test_too_little_to_halve_is_refused():
    with pytest.raises(UsageError, match="halves"):
        draw_halves(100, 0, seed=0)
    with pytest.raises(UsageError, match="subsets"):
        draw_halves(7, 2, seed=0)


def test_what_explains_the_responses_is_stable_and_reliable():
    columns = regular_columns(400, 120, 6)
    weights = np.zeros(400)
    weights[[3, 50, 77]] = 2.0, 1.5, -1.0
    (halves,) = solve_halves(
        [columns], planted(columns, 120, weights, 0.05)[None], n_subsets=120, seed=0, draws=10
    )
    assert halves.reliability > 0.9
    document = np.arange(400)
    found = document_stability(halves, columns, document, np.array([50, 3, 9]), top=2)
    assert min(found[:2]) >= 0.9 and found[2] <= 0.2
    assert document_stability(halves, columns, document, np.array([77]), top=1, sign=-1) >= 0.9


def test_noise_is_neither():
    columns = regular_columns(2000, 120, 6)
    y = np.random.default_rng(2).normal(size=120)
    (halves,) = solve_halves(
        [columns], y[None], LassoSettings(lambda_ratio=0.03), n_subsets=120, seed=0, draws=10
    )
    assert halves.reliability < 0.2
    # R² of what was seen says nothing: there are weights enough to fit anything
    assert np.mean([half.r_squared for half in halves.solutions]) > 0.9
    best = [half.indices[np.argmax(half.values)] for half in halves.solutions]
    assert document_stability(halves, columns, np.arange(2000), np.unique(best), top=10).mean() < 0.5


def test_reliability_is_the_correlation_on_the_rows_left_out():
    columns = regular_columns(60, 24, 4)
    y = planted(columns, 24, np.random.default_rng(1).normal(size=60), 0.1)
    (halves,) = solve_halves(
        [columns], y[None], LassoSettings(lambda_ratio=0.2), n_subsets=24, seed=7, draws=4
    )
    matrix = np.zeros((24, 60))
    matrix[columns.T, np.arange(60)] = 1.0
    expected = []
    for half, kept in zip(halves.solutions, halves.kept, strict=True):
        weights = np.zeros(60)
        weights[half.indices] = half.values
        expected.append(np.corrcoef((matrix @ weights)[~kept], y[~kept])[0, 1])
    assert halves.reliability == pytest.approx(max(0.0, np.mean(expected)))


def test_constant_responses_are_not_reliable():
    columns = regular_columns(60, 24, 4)
    assert solve_halves([columns], np.ones((1, 24)), n_subsets=24, seed=7, draws=2)[0].reliability == 0.0


def test_documents_are_counted_by_mid_rank_in_the_halves_that_measure_them():
    columns = np.array([[0, 1], [0, 2], [4, 5], [6, 7]], np.uint16)
    document = np.array([0, 0, 1, 2])
    kept = np.zeros((3, 8), bool)
    kept[0, :4] = kept[1, 4:] = kept[2, 2:6] = True
    solutions = [solution({0: 1.0, 1: 1.0}, 4), solution({2: 2.0, 3: 2.0}, 4), solution({1: -1.0, 2: 1.0}, 4)]
    halves = Halves(kept, solutions, 0.5)
    # documents 1 and 2 tie in the second half: mid-rank 1.5
    found = document_stability(halves, columns, document, np.array([2, 0, 1]), top=1)
    np.testing.assert_allclose(found, [0.0, 0.5, 0.5])
    found = document_stability(halves, columns, document, np.array([2, 0, 1]), top=2)
    np.testing.assert_allclose(found, [1.0, 0.5, 1.0])
    opposing = document_stability(halves, columns, document, np.array([0]), top=1, sign=-1)
    np.testing.assert_allclose(opposing, [0.5])


def test_a_document_in_no_half_has_no_stability():
    columns = np.array([[0, 1], [4, 5]], np.uint16)
    halves = Halves(np.arange(8)[None] >= 4, [solution({1: 1.0}, 2)], 0.5)
    found = document_stability(halves, columns, np.arange(2), np.array([0, 1]), top=1)
    assert np.isnan(found[0]) and found[1] == 1.0
    hit = Hit(1.0, 0, 1.0, 1.0, "supports", 0, False, 0, True)
    assert with_stability(halves, columns, np.arange(2), [hit], top=1, sign=1)[0].stability is None
    assert with_stability(halves, columns, np.arange(2), [], top=1, sign=1) == []


def test_a_half_is_the_lasso_of_its_rows():
    columns = regular_columns(100, 30, 4)
    y = np.random.default_rng(0).normal(size=30)
    (halves,) = solve_halves(
        [columns], y[None], LassoSettings(lambda_ratio=0.3, nonneg=True), n_subsets=30, seed=1, draws=2
    )
    for half, kept in zip(halves.solutions, halves.kept, strict=True):
        alone = solve_batch(
            columns, y[None], LassoSettings(lambda_ratio=0.3, nonneg=True), n_subsets=30, kept=kept[None]
        )[0]
        assert (half.values > 0).all()
        assert half.lambda_ == pytest.approx(alone.lambda_)
        assert half.residual @ half.residual == pytest.approx(alone.residual @ alone.residual, rel=0.02)
