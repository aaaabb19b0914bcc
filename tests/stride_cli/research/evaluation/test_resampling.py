"""Bootstrap of LDS: against resampling done literally, and against intervals that are known."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stride_cli.research.evaluation import metrics
from stride_cli.research.evaluation.resampling import Resampler, mean_interval


@given(st.integers(0, 1000), st.integers(3, 15))
@settings(max_examples=25)
@pytest.mark.parametrize("kind", ["spearman", "pearson", "kendall"])
def test_draws_are_literal_resamples(kind: str, seed: int, size: int) -> None:
    """The correlation of the repeated rows, with ties in the data too; Kendall's of different rows."""
    generator = np.random.default_rng(seed)
    predicted, measured = generator.integers(0, 6, (2, 3, size)).astype(float)
    resampler = Resampler(measured, draws=5, seed=seed)
    found = getattr(metrics.correlate(predicted, measured), kind)
    draws = resampler.draw(kind, predicted, found)
    for number in range(5):
        rows = np.repeat(np.arange(size), resampler.subset_counts[number].astype(int))
        literal = getattr(metrics.correlate(predicted[:, rows], measured[:, rows]), kind)
        if kind == "kendall":
            different = np.count_nonzero(rows[:, None] != rows)
            literal = literal * size * (size - 1) / different if different else np.zeros(3)
        queries = np.repeat(np.arange(3), resampler.query_counts[number].astype(int))
        assert draws.subsets[number] == pytest.approx(literal.mean())
        assert draws.queries[number] == pytest.approx(found[queries].mean())
        assert draws.joint[number] == pytest.approx(literal[queries].mean())


def test_subsets_drawn_twice_do_not_move_the_interval() -> None:
    """Ties of repeated subsets lower every drawn rank correlation: below the estimate, without centring."""
    generator = np.random.default_rng(0)
    measured = generator.normal(size=(60, 30))
    predicted = measured + 0.5 * generator.normal(size=(60, 30))
    observed = metrics.correlate(predicted, measured).spearman
    draws = Resampler(measured, draws=300).draw("spearman", predicted, observed)
    found = draws.estimate().subsets
    assert draws.subsets.mean() < found.mean - found.se
    assert found.mean - found.low == pytest.approx(found.high - found.mean, rel=0.5)


def test_interval_over_queries_is_the_textbook_one() -> None:
    values = np.random.default_rng(0).normal(size=400)
    found = mean_interval(values, draws=4000)
    error = values.std(ddof=1) / 20
    assert found.se == pytest.approx(error, rel=0.05)
    assert found.low == pytest.approx(values.mean() - 1.96 * error, abs=0.15 * error)
    assert found.high == pytest.approx(values.mean() + 1.96 * error, abs=0.15 * error)
    assert found == mean_interval(values, draws=4000)
    assert np.isnan(mean_interval(np.array([np.nan])).mean)
