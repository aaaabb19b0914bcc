"""Definitions of app:metrics against hand-sized tables, scipy and brute force."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import stats

from stride_cli.research.evaluation import metrics

# small integers: many ties
TIED = st.integers(3, 12).flatmap(lambda size: arrays(np.int64, (2, size), elements=st.integers(-3, 3)))
SCORES = st.integers(1, 40).flatmap(
    lambda size: arrays(
        np.float64, (3, size), elements=st.one_of(st.just(0.0), st.floats(-1e6, 1e6, width=32))
    )
)


def test_lds_of_a_table_by_hand() -> None:
    """Two queries, three chunks, four subsets; the second query's prediction is the truth reversed."""
    masks = np.array([[1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 0]], bool)
    scores = np.array([[1.0, 2.0, 4.0], [1.0, 2.0, 4.0]])
    predicted = np.array([1.0, 2.0, 4.0, 3.0])
    # −loss = the prediction (first query), its opposite (second); mean over two seeds that differ by ±1
    truth = np.stack([-predicted, predicted], axis=1)  # (R, Q) losses
    losses = np.stack([truth + 1, truth - 1], axis=1)  # (R, S, Q)
    found = metrics.lds(scores, masks, losses)
    for name in ("spearman", "pearson", "kendall"):
        assert getattr(found, name) == pytest.approx([1, -1])
    by_margin = metrics.lds(scores, masks, losses, margins=losses)
    assert by_margin.spearman == pytest.approx([-1, 1])  # a high margin is good, a high loss is not
    assert not found.constant.any() and len(found) == 2


@given(TIED)
def test_correlations_agree_with_scipy_with_ties(pair: np.ndarray) -> None:
    left, right = pair
    found = metrics.correlate(left[None].astype(float), right[None].astype(float))
    if np.ptp(left) == 0 or np.ptp(right) == 0:
        assert found.spearman[0] == found.pearson[0] == found.kendall[0] == 0
        return
    assert found.spearman[0] == pytest.approx(stats.spearmanr(left, right).statistic)
    assert found.pearson[0] == pytest.approx(stats.pearsonr(left, right).statistic)
    # scipy has τ_b; the paper's τ_a keeps tied pairs in its denominator
    pairs = len(left) * (len(left) - 1) / 2
    tied = [sum(c * (c - 1) / 2 for c in np.unique(side, return_counts=True)[1]) for side in pair]
    scale = np.sqrt((pairs - tied[0]) * (pairs - tied[1])) / pairs
    assert found.kendall[0] == pytest.approx(stats.kendalltau(left, right).statistic * scale)


def test_ceiling_is_what_a_perfect_prediction_reaches() -> None:
    """Truth = signal + noise of the same size per seed: reliability of 4 seeds is 4 / (4 + 1)."""
    generator = np.random.default_rng(1)
    signal = generator.normal(size=(200, 1, 30))
    losses = signal + generator.normal(size=(200, 4, 30))
    ceiling = metrics.noise_ceiling(losses)
    assert ceiling is not None and ceiling**2 == pytest.approx(0.8, abs=0.03)
    reached = metrics.correlate(-signal[:, 0].T, metrics.measured_response(losses)).spearman.mean()
    assert ceiling == pytest.approx(reached, abs=0.02)
    odd = metrics.noise_ceiling(losses[:, :3])
    assert odd is not None and odd**2 == pytest.approx(0.75, abs=0.03)


@given(SCORES)
def test_gini_is_the_double_sum_and_never_below_the_share_of_zeros(scores: np.ndarray) -> None:
    found, zeros = metrics.gini(scores), metrics.zero_share(scores)
    for row, value, zero in zip(np.abs(scores), found, zeros, strict=True):
        if row.sum() == 0:
            assert np.isnan(value)
            continue
        double = np.abs(row[:, None] - row).sum() / (2 * len(row) * row.sum())
        assert value == pytest.approx(double, abs=1e-9)
        assert zero - 1e-9 <= value < 1


@given(SCORES)
def test_coverage_and_active_sets_by_brute_force(scores: np.ndarray) -> None:
    found = metrics.top_coverage(scores)
    for row, value in zip(np.abs(scores), found, strict=True):
        if row.sum() > 0:
            top = sorted(row, reverse=True)[: len(row) // 10]
            assert value == pytest.approx(sum(top) / row.sum())
    n = scores.shape[1]
    assert (metrics.active_set(scores) == np.round((1 - metrics.zero_share(scores)) * n)).all()
