"""Which chunks are looked at directly after a recovery, and what becomes of the weights."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from index_format.design import build_columns
from stride_cli.recovery.candidates import Debiased, candidates, with_weights
from stride_cli.recovery.lasso import solve_lasso
from stride_cli.recovery.problem import LassoSettings

N, DEGREE = 600, 4


EVERYTHING = slice(0, N)


def planted(n_subsets: int, count: int, *, seed: int = 0):
    """A design, true influences (N,) with `count` large ones among noise, and the solution of their sums."""
    random = np.random.default_rng(seed)
    truth = 0.05 * random.normal(size=N)
    large = random.choice(N, count, replace=False)
    truth[large] += 1.0 + random.random(count)
    columns = build_columns(0, N, n_subsets=n_subsets, degree=DEGREE, seed=0)
    y = np.zeros(n_subsets)
    np.add.at(y, columns.astype(np.int64), truth[:, None])
    found = solve_lasso(columns, y - y.mean(), LassoSettings(lambda_ratio=0.1), n_subsets=n_subsets)
    return columns, truth, large, found


def test_they_hold_what_matters_also_beyond_the_support() -> None:
    """Far fewer subsets than the Lasso needs: the candidates still hold most of the large influences."""
    columns, _, large, found = planted(30, 12)
    inside = candidates(columns, found, 150).chunks
    assert len(inside) == 150 > len(found.indices)
    assert (np.diff(inside) > 0).all()
    share = np.isin(large, inside).mean()
    assert share >= 0.6 > 2 * 150 / N  # chance: a quarter
    assert share >= np.isin(large, found.indices).mean()


@pytest.mark.parametrize("n_subsets", [30, 200])
def test_a_second_estimate_counts_in_units_of_its_noise(n_subsets: int) -> None:
    """The error's size is known from the residual alone, nearly; together the two find more."""
    columns, truth, large, found = planted(n_subsets, 25)
    second = truth + np.random.default_rng(5).normal(size=N) * 2 * truth.std()
    second = (second - second.mean()) / second.std()
    debiased = Debiased(columns, found)
    estimate, noise = debiased(EVERYTHING), debiased.noise
    truth = truth - truth.mean()
    assert noise == pytest.approx(np.std(estimate - truth), rel=0.5)
    both = estimate / noise + second
    both = np.where(both > 0, both, -0.3 * both)
    chosen = candidates(columns, found, 60, second.__getitem__).chunks
    np.testing.assert_array_equal(chosen, np.sort(np.argsort(-both, kind="stable")[:60]))

    def share(chunks: np.ndarray) -> float:
        return float(np.isin(large, chunks).mean())

    assert share(chosen) >= max(share(candidates(columns, found, 60).chunks), share(np.argsort(-second)[:60]))


def test_the_recovery_is_trusted_as_far_as_the_subsets_tell() -> None:
    def trust(columns, _truth, _large, found) -> float:
        assert candidates(columns, found, 9).others == 1.0  # without a second estimate
        return candidates(columns, found, 9, np.zeros(N).__getitem__).others

    few, many = (trust(*planted(n_subsets, 12)) for n_subsets in (20, 400))
    assert 0 <= few < 0.5 < many < 1
    columns, *rest, found = planted(200, 5)
    nothing = replace(found, indices=found.indices[:0], values=found.values[:0], residual=0 * found.residual)
    assert trust(columns, *rest, nothing) == 0.0


@pytest.mark.parametrize(("count", "left"), [(0, 0), (N, N), (10 * N, N)])
def test_any_number_can_be_asked_for(count: int, left: int) -> None:
    columns, _, _, found = planted(30, 5)
    assert len(candidates(columns, found, count).chunks) == left


def test_new_weights_stand_in_for_the_recovered_ones() -> None:
    _, _, _, found = planted(60, 5)
    kept, changed = found.indices[0], found.indices[1]
    new = next(i for i in range(N) if i not in found.indices)
    refined = with_weights(found, np.array([new, changed]), np.array([7.0, 0.0]))
    weights = np.zeros(N)
    weights[refined.indices] = refined.values
    assert weights[new] == 7.0 and weights[changed] == 0.0 and changed not in refined.indices
    assert weights[kept] == found.values[0]
    assert (np.diff(refined.indices) > 0).all()
    np.testing.assert_array_equal(refined.residual, found.residual)
    halved = with_weights(found, np.array([new]), np.array([7.0]), others=0.5)
    place = np.searchsorted(halved.indices, found.indices)
    np.testing.assert_allclose(halved.values[place], found.values / 2)


def test_the_debiased_estimate_and_its_error_in_numbers() -> None:
    """ŵ = w + Mᵀ r / ((d − d²/K) (1 − nnz/K)); the error is of d residuals."""
    n_subsets = 40  # few, so that d²/K counts
    columns, _, _, found = planted(n_subsets, 5)
    scale = (DEGREE - DEGREE**2 / n_subsets) * max(0.3, 1 - len(found.indices) / n_subsets)
    M = np.zeros((n_subsets, N))
    M[columns.T.astype(int), np.arange(N)] = 1
    expected = M.T @ found.residual / scale
    expected[found.indices] += found.values
    debiased = Debiased(columns, found)
    np.testing.assert_allclose(debiased(EVERYTHING), expected, atol=1e-12)
    assert debiased.noise == pytest.approx(np.sqrt(DEGREE * found.residual.var()) / scale)
