"""Fewer non-zeros, the same fit."""

from __future__ import annotations

import numpy as np
import pytest

from stride_cli.recovery.thinning import thin


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("nonneg", [False, True])
@pytest.mark.parametrize("count", [5, 40, 200])
def test_thinned_weights_fit_the_same_on_independent_columns(rng, centred, nonneg, count):
    rows = np.unique(np.sort(rng.random((count, 30)).argsort(axis=1)[:, :5], axis=1), axis=0).astype(
        np.uint16
    )
    weights = rng.normal(size=len(rows))
    if nonneg:
        weights = np.abs(weights)
    matrix = np.zeros((30, len(rows)))
    matrix[rows.T, np.arange(len(rows))] = 1.0
    if centred:
        matrix -= 5 / 30
    penalties = rng.uniform(0.5, 2.0, len(rows))
    thinned = thin(rows, weights, penalties, 30, centred=centred)
    np.testing.assert_allclose(matrix @ thinned, matrix @ weights, atol=1e-9)
    assert penalties @ np.abs(thinned) <= penalties @ np.abs(weights) + 1e-9
    support = np.flatnonzero(thinned)
    assert len(support) <= 30 - centred
    assert np.linalg.matrix_rank(matrix[:, support]) == len(support)
    if len(rows) <= 4:
        np.testing.assert_array_equal(thinned, weights)
    if nonneg:
        assert (thinned >= 0).all()


def test_too_many_subsets_are_left_alone():
    rows = np.array([[0, 1], [1, 2]], dtype=np.uint32)
    weights = np.array([1.0, 2.0])
    assert thin(rows, weights, np.ones(2), 1_000_000, centred=True) is weights
