"""Conditioning on the subsets' responses, against linear algebra written out."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stride_cli.recovery.conditioning import corrections


def design(n: int, k: int, d: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    columns = np.stack([np.sort(random.choice(k, d, replace=False)) for _ in range(n)]).astype(np.uint16)
    matrix = np.zeros((k, n))
    matrix[columns, np.arange(n)[:, None]] = 1.0
    return columns, matrix


@given(
    n=st.integers(4, 60),
    k=st.integers(3, 20),
    intercept=st.booleans(),
    exact=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=40, deadline=None)
def test_it_is_the_posterior_mean(n: int, k: int, intercept: bool, exact: bool, seed: int) -> None:
    columns, matrix = design(n, k, min(3, k), seed)
    random = np.random.default_rng(seed)
    means = random.normal(size=n)
    variances = np.where(random.uniform(size=n) < 0.3, 0.0, random.exponential(size=n))
    response = matrix @ (means + np.sqrt(variances) * random.normal(size=n)) + 5.0 * intercept
    found = corrections(columns, response, means, variances, exact=exact, intercept=intercept)
    # a constant of any size: one more unknown of endless variance
    left, spread = response - matrix @ means, matrix * variances @ matrix.T
    centred = left - left.mean() if intercept else left
    noise = max(1e-3 * spread.diagonal().mean(), 1e-4 * response.var())
    if not variances.any():
        np.testing.assert_array_equal(found, np.zeros(n))
        return
    if not exact:
        noise = max(noise, np.square(centred).mean() - spread.diagonal().mean())
    system = spread + noise * np.eye(k) + 1e7 * intercept
    wanted = variances * (matrix.T @ np.linalg.solve(system, left))
    np.testing.assert_allclose(found, wanted, atol=2e-3 * max(1.0, np.abs(wanted).max()))
    assert (found[variances == 0] == 0).all()


@pytest.mark.parametrize(("share", "gained"), [(2, 0.6), (16, 0.97)])
def test_errors_are_less_by_the_share_that_is_measured(share: int, gained: float) -> None:
    n = 2_000
    columns, matrix = design(n, n // share, 10, 0)
    random = np.random.default_rng(1)
    truth = random.standard_t(3, n)
    variances = random.uniform(0.1, 1.0, n)
    means = truth + np.sqrt(variances) * random.normal(size=n)
    found = means + corrections(columns, matrix @ truth, means, variances, exact=True, intercept=False)
    error = np.square(found - truth).mean() / np.square(means - truth).mean()
    assert 1.0 - 1.3 / share < error < gained
    # the responses are those of the result
    left = matrix @ (found - truth)
    assert np.square(left).mean() < 1e-3 * np.square(matrix @ (means - truth)).mean()


def test_responses_that_are_no_sums_are_taken_for_noise() -> None:
    n, k = 400, 200
    columns, matrix = design(n, k, 5, 0)
    random = np.random.default_rng(1)
    truth = random.normal(size=n)
    means, variances = truth + 0.1 * random.normal(size=n), np.full(n, 0.01)
    wrong = matrix @ truth + 3.0 * random.normal(size=k)
    errors = [
        np.square(
            means + corrections(columns, wrong, means, variances, exact=exact, intercept=True) - truth
        ).mean()
        for exact in (True, False)
    ]
    assert errors[1] < 0.012 < 0.1 < errors[0]
