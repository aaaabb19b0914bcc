"""What influences are in nats: the fit, and what models are trained without."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stride_cli.attribution.nats import Nats, choose_scale, fit_ceiling, fit_line, scale_of
from stride_cli.attribution.scale import removed_parts
from stride_cli.data.workspace import Workspace
from stride_cli.errors import UsageError
from stride_cli.schema.derivation import to_record

LINE = Nats(2.0, None, None, 0.1, 0.9, 3, 288)
CLIMB = Nats(None, 8.0, 0.25, 0.5, 0.9, 3, 288, [[0.0, -0.1, 0.1], [6.0, 2.0, 9.0]])


@given(st.floats(1e-6, 1e6), st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_the_slope_is_found_within_its_error(slope: float, seed: int) -> None:
    random = np.random.default_rng(seed)
    predicted = random.exponential(size=(3, 96)) * (random.random((3, 96)) < 0.3)
    found = fit_line(predicted, slope * (predicted + 0.1 * random.normal(size=(3, 96))))
    assert abs(found.slope - slope) < 6 * found.error and found.error < 0.1 * slope
    assert found.sure and found.correlation > 0.9 and (found.models, found.pairs) == (3, 288)


def _shares(random: np.random.Generator) -> np.ndarray:
    """Of what is removed: most responses keep their source, some lose it. (3, 96)"""
    return np.where(random.random((3, 96)) < 0.2, random.uniform(0.1, 0.9, (3, 96)), 0.02)


@given(st.floats(0.5, 20), st.floats(0.1, 0.6), st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_a_ceiling_and_the_way_to_it_are_found(ceiling: float, half: float, seed: int) -> None:
    random = np.random.default_rng(seed)
    shares = _shares(random)
    rises = ceiling * (1 - 2.0 ** -((shares / half) ** 2))
    found = fit_ceiling(shares, rises + 0.05 * ceiling * random.normal(size=rises.shape))
    # shares that are tried for `half` are 2 % apart
    assert abs(found.ceiling - ceiling) < 6 * found.error + 0.03 * ceiling and found.error < 0.3 * ceiling
    assert found.half == pytest.approx(half, rel=0.25) and found.sure and found.correlation > 0.95
    exact = fit_ceiling(shares, rises)
    assert exact.ceiling == pytest.approx(ceiling, rel=0.03) and exact.half == pytest.approx(half, rel=0.03)


@pytest.mark.parametrize(("fit", "runs"), [(fit_line, 200), (fit_ceiling, 60)])
def test_what_predicts_nothing_is_not_sure(fit: Callable[..., Nats], runs: int) -> None:
    random = np.random.default_rng(0)
    sure = [fit(_shares(random), random.normal(size=(3, 96))).sure for _ in range(runs)]
    assert np.mean(sure) < 0.05  # three standard errors
    nothing = fit(np.zeros((3, 96)), random.normal(size=(3, 96)))
    assert not (nothing.slope or nothing.ceiling or nothing.sure)
    assert not fit(_shares(random), -random.random((3, 96))).sure


def test_what_a_forecast_is() -> None:
    found = CLIMB
    assert found.rise(0.0, 10.0, 0.2) == 0
    assert found.rise(2.5, 10.0, 0.2) == pytest.approx(4.0)  # half of the ceiling without a quarter
    assert found.rise(5.0, 20.0, 0.2) == found.rise(2.5, 10.0, 0.2)  # shares, whatever the size of the design
    assert 7.9 < found.rise(10.0, 10.0, 0.2) <= 8.0 == found.rise(np.inf, 10.0, 0.2)
    assert found.rise(-0.4, 10.0, 0.2) == pytest.approx(-found.rise(0.4, 10.0, 0.2))
    assert found.rise(-9.0, 10.0, 0.2) == -0.2  # there is no more loss to take away
    assert found.rise(1.0, 0.0, 0.2) == 0  # nothing has any influence
    # two documents together are not what they are one by one
    assert found.rise(2.0, 10.0, 0.2) > 2 * found.rise(1.0, 10.0, 0.2)
    many = found.rise(np.array([[1.0, 2.0], [3.0, -4.0]]), np.array([10.0, 20.0]), np.array([0.1, 0.2]))
    one = [[found.rise(1.0, 10.0, 0.1), found.rise(2.0, 20.0, 0.2)], [found.rise(3.0, 10.0, 0.1), -0.2]]
    np.testing.assert_allclose(many, one)
    assert LINE.rise(-3.0, 10.0, 0.2) == -6.0


def test_a_scale_comes_back_from_its_record() -> None:
    assert [scale_of(to_record(scale)) for scale in (LINE, CLIMB)] == [LINE, CLIMB]
    older = {"slope": 2.0, "error": 0.1, "correlation": 0.9, "models": 3, "pairs": 288}
    assert scale_of(older) == LINE


def test_rises_choose_between_a_line_and_a_ceiling() -> None:
    """Of a model that was trained from scratch; of a fine-tuned one nothing is chosen."""
    random = np.random.default_rng(1)
    shares, totals = _shares(random), random.uniform(10, 100, 96)
    climbing, rising = 8 * (1 - 2.0 ** -((shares / 0.3) ** 2)), 0.01 * shares * totals
    noise = 0.01 * random.normal(size=shares.shape)
    for measured, heart in ((climbing, True), (climbing, False), (rising, True), (rising, False)):
        found = choose_scale(shares * totals, totals, measured + noise, heart=heart)
        assert found.link == ("ceiling" if heart and measured is climbing else "linear")


def _trained(random: np.random.Generator, heart: bool) -> tuple[np.ndarray, ...]:
    """Three parts, each under a seed whose luck all responses have: Σ w, Σ |w|, and rises."""
    own = np.arange(160) % 4 == np.arange(3)[:, None]
    shares = np.where(own, random.beta(1.2, 1.5, own.shape), random.normal(0.0, 0.03, own.shape))
    totals, luck = random.uniform(10, 100, 160), np.exp(random.normal(0.0, 0.1, (3, 1)))
    rises = 8 * (1 - 2.0 ** -((shares / 0.3) ** 2)) * np.sign(shares) if heart else 0.05 * shares * totals
    error = (0.006 * np.abs(rises).max() + 0.25 * np.abs(rises)) * random.standard_t(5, rises.shape)
    return shares * totals, totals, luck * rises * np.exp(random.normal(0.0, 0.35, rises.shape)) + error


def test_nine_in_ten_rises_lie_in_the_interval_of_their_forecast() -> None:
    """Of other parts, responses and seeds than the scale was found by; not so within the scale's error."""
    assert choose_scale(*_trained(np.random.default_rng(0), False), heart=False).interval(1.0) == (None, None)
    held, large, error = [], [], []
    for number in range(12):
        random = np.random.default_rng([number, True])
        scale = choose_scale(*_trained(random, True), heart=True)
        sums, totals, rises = _trained(random, True)
        forecasts = scale.rise(sums, totals, np.inf)
        low, high = np.vectorize(scale.interval)(forecasts)
        held.append((low <= rises) & (rises <= high))
        large.append(held[-1][forecasts > np.quantile(forecasts, 0.8)].mean())
        error.append(np.abs(rises / forecasts - 1) < scale.error / scale.ceiling)
    assert 0.85 < np.mean(held) < 0.95 and 0.85 < np.mean(large) < 0.95 and np.mean(error) < 0.3


def _workspace(documents: np.ndarray) -> Workspace:
    index = SimpleNamespace(array=lambda name: {"corpus/chunk_document": documents}[name])
    return Workspace(index, SimpleNamespace(), None, 5)


def test_parts_are_tenths_of_the_documents() -> None:
    workspace = _workspace(np.arange(90) // 2)
    parts = removed_parts(workspace, 3)
    assert parts.shape == (3, 90) and (parts.sum(axis=1) == 8).all()
    assert parts.sum(axis=0).max() == 1  # none of them twice
    np.testing.assert_array_equal(parts, removed_parts(workspace, 3))


def test_too_little_to_take_tenths_of_is_refused() -> None:
    for documents, models in ((39, 3), (40, 6)):
        with pytest.raises(UsageError, match="tenths of"):
            removed_parts(_workspace(np.arange(documents)), models)
