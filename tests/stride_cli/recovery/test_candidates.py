"""Which chunks exact gradients are taken of, by a solution without them."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from index_format.design import build_columns
from stride_cli.recovery.candidates import likeliest
from stride_cli.recovery.lasso import solve_lasso
from stride_cli.recovery.problem import LassoSettings, Prior, dense

N, DEGREE = 600, 4


def planted(n_subsets: int, count: int):
    """A design, true influences (N,) with `count` large ones among noise, and their sums."""
    random = np.random.default_rng(0)
    truth = 0.05 * random.normal(size=N)
    large = random.choice(N, count, replace=False)
    truth[large] += 1.0 + random.random(count)
    columns = build_columns(0, N, n_subsets=n_subsets, degree=DEGREE, seed=0)
    y = np.zeros(n_subsets)
    np.add.at(y, columns.astype(np.int64), truth[:, None])
    return columns, truth, large, y - y.mean()


def test_they_hold_what_matters_also_beyond_the_support() -> None:
    """Far fewer subsets than the Lasso needs: the candidates still hold most of the large influences."""
    columns, _, large, y = planted(30, 12)
    found = solve_lasso(columns, y, LassoSettings(lambda_ratio=0.1), n_subsets=30)
    inside = likeliest(columns, found, 150)
    assert len(inside) == 150 > len(found.indices)
    assert (np.diff(inside) > 0).all()
    share = np.isin(large, inside).mean()
    assert share >= 0.6 > 2 * 150 / N  # chance: a quarter
    assert share >= np.isin(large, found.indices).mean()


def test_without_a_weight_they_are_those_that_the_residual_calls_for() -> None:
    columns, _, _, y = planted(30, 12)
    found = solve_lasso(columns, y, LassoSettings(lambda_ratio=0.1), n_subsets=30)
    debiased = dense([found])[0] + found.residual[columns].sum(axis=1) / (DEGREE - DEGREE**2 / 30)
    strength = np.where(debiased > 0, debiased, -0.3 * debiased)
    wanted = np.sort(np.argsort(-strength, kind="stable")[:60])
    assert np.isin(likeliest(columns, found, 60), wanted).mean() > 0.95


@pytest.mark.parametrize("n_subsets", [30, 200])
def test_estimates_and_subsets_together_choose_better_than_either(n_subsets: int) -> None:
    columns, truth, large, y = planted(n_subsets, 25)
    noise = 2 * truth.std()
    means = truth + np.random.default_rng(5).normal(size=N) * noise
    prior = Prior(means * truth.var() / (truth.var() + noise**2), np.full(N, noise))
    settings = LassoSettings(lambda_ratio=0.01)
    both = solve_lasso(columns, y, settings, n_subsets=n_subsets, prior=prior)
    alone = solve_lasso(columns, y, settings, n_subsets=n_subsets)

    def share(chunks: np.ndarray) -> float:
        return float(np.isin(large, chunks).mean())

    best = max(share(likeliest(columns, alone, 60)), share(np.argsort(-means)[:60]))
    assert share(likeliest(columns, both, 60)) >= best - 0.04


def test_there_are_as_many_as_are_asked_for_whatever_is_left_to_explain() -> None:
    columns, _, _, y = planted(30, 12)
    for own in (y, np.zeros(30)):
        found = solve_lasso(columns, own, n_subsets=30)
        for count in (1, 40, N - 1, N, 2 * N):
            chosen = likeliest(columns, found, count)
            assert len(np.unique(chosen)) == min(count, N) and (np.diff(chosen) > 0).all()


def test_choosing_holds_little_of_many_chunks() -> None:
    """Of a million chunks every number for each would be 8 MB."""
    n = 1_000_000
    columns = build_columns(0, n, n_subsets=100, degree=5, seed=0)
    y = np.random.default_rng(0).normal(size=100)
    found = solve_lasso(columns, y, LassoSettings(0.5), n_subsets=100)
    likeliest(columns, found, 50)  # compiled
    tracemalloc.start()
    try:
        assert len(likeliest(columns, found, 50)) == 50
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 6e6
