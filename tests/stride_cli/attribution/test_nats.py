"""What influences are in nats: the fit, and what models are trained without."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stride_cli.attribution.nats import Nats, choose_scale, fit_ceiling, fit_line, scale_of
from stride_cli.attribution.scale import removed_parts, responses_of
from stride_cli.data.batches import ChunkReader
from stride_cli.data.workspace import Workspace
from stride_cli.errors import UsageError
from stride_cli.schema.derivation import to_record


@given(st.floats(1e-6, 1e6), st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_the_slope_is_found_within_its_error(slope: float, seed: int) -> None:
    random = np.random.default_rng(seed)
    predicted = random.exponential(size=(3, 96)) * (random.random((3, 96)) < 0.3)
    noise = 0.1 * slope * random.normal(size=predicted.shape)
    found = fit_line(predicted, slope * predicted + noise)
    assert abs(found.slope - slope) < 6 * found.error and found.error < 0.1 * slope
    assert found.sure and found.correlation > 0.9 and (found.models, found.pairs) == (3, 288)
    exact = fit_line(predicted, slope * predicted)
    assert exact.slope == pytest.approx(slope) and exact.error < 1e-6 * slope


def test_what_predicts_nothing_is_not_sure() -> None:
    random = np.random.default_rng(0)
    predicted, measured = random.exponential(size=(2, 3, 60))
    unsure = [
        fit_line(predicted, random.normal(size=(3, 60))).sure
        for predicted in random.normal(size=(200, 3, 60))
    ]
    assert np.mean(unsure) < 0.02  # three standard errors
    assert not fit_line(predicted, -measured).sure
    nothing = fit_line(np.zeros((3, 60)), measured)
    assert nothing.slope == 0 and not nothing.sure


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
    assert (found.models, found.pairs) == (3, 288)
    exact = fit_ceiling(shares, rises)
    assert exact.ceiling == pytest.approx(ceiling, rel=0.03) and exact.half == pytest.approx(half, rel=0.03)


def test_rises_that_have_nothing_to_do_with_shares_have_no_sure_ceiling() -> None:
    random = np.random.default_rng(0)
    sure = [fit_ceiling(_shares(random), random.normal(size=(3, 96))).sure for _ in range(60)]
    assert np.mean(sure) < 0.05
    nothing = fit_ceiling(np.zeros((3, 96)), random.normal(size=(3, 96)))
    assert nothing.ceiling == 0 and not nothing.sure


def test_what_a_forecast_is() -> None:
    found = Nats(None, 8.0, 0.25, 0.5, 0.9, 3, 288)
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
    assert Nats(2.0, None, None, 0.1, 0.9, 3, 288).rise(-3.0, 10.0, 0.2) == -6.0


LINE, CLIMB = Nats(2.0, None, None, 0.1, 0.9, 3, 288), Nats(None, 8.0, 0.25, 0.5, 0.9, 3, 288)


@pytest.mark.parametrize("scale", [LINE, CLIMB])
def test_a_scale_comes_back_from_its_record(scale: Nats) -> None:
    assert scale_of(to_record(scale)) == scale
    older = {"slope": 2.0, "error": 0.1, "correlation": 0.9, "models": 3, "pairs": 288}
    assert scale_of(older) == LINE


def test_rises_choose_between_a_line_and_a_ceiling() -> None:
    """Of a model that was trained from scratch; of a fine-tuned one nothing is chosen."""
    random = np.random.default_rng(1)
    shares, totals = _shares(random), random.uniform(10, 100, 96)
    climbing, rising = 8 * (1 - 2.0 ** -((shares / 0.3) ** 2)), 0.01 * shares * totals
    noise = 0.01 * random.normal(size=shares.shape)
    for measured, heart, line in (
        (climbing, True, False),
        (climbing, False, True),
        (rising, True, True),
        (rising, False, True),
    ):
        found = choose_scale(shares * totals, totals, measured + noise, heart=heart)
        assert found.additive == line


def _workspace(chunks: ChunkReader, documents: np.ndarray, *, pretrained: bool = False) -> Workspace:
    index = SimpleNamespace(array=lambda name: {"corpus/chunk_document": documents}[name])
    return Workspace(index, SimpleNamespace(pretrained=pretrained), chunks, 5)


def test_responses_of_what_may_be_known_by_heart_are_short_parts(chunks: ChunkReader) -> None:
    n = chunks.n_chunks
    workspace = _workspace(chunks, np.arange(n), pretrained=True)
    parts = removed_parts(workspace, 3)
    queries, again = responses_of(workspace, parts), responses_of(workspace, parts)
    whole = responses_of(workspace, parts, whole=True)
    assert [row.sum() for row in whole.weights] != [row.sum() for row in queries.weights]
    fine_tuned = responses_of(_workspace(chunks, np.arange(n)), parts)
    assert fine_tuned.fingerprint() == whole.fingerprint()  # whole, as ever
    assert queries.fingerprint() == again.fingerprint()
    lengths = []
    for name, ids, weights in zip(queries.names, queries.ids, queries.weights, strict=True):
        of, known = chunks.chunk(int(name))
        np.testing.assert_array_equal(ids, of[: len(ids)])  # with what is before it
        scored = np.flatnonzero(weights)
        assert (known[scored] > 0).all() and scored[-1] == len(ids) - 1
        if known[8:].sum() > 16:
            assert scored[0] >= 8
            lengths.append(len(scored))
    assert lengths and set(lengths) <= {4, 8, 16}


def test_parts_are_tenths_of_the_documents_and_have_responses_in_them(chunks: ChunkReader) -> None:
    n = chunks.n_chunks
    assert n >= 40
    workspace = _workspace(chunks, np.arange(n))
    parts = removed_parts(workspace, 3)
    assert parts.shape == (3, n) and (parts.sum(axis=1) == round(n / 10)).all()
    assert parts.sum(axis=0).max() == 1  # none of them twice
    np.testing.assert_array_equal(parts, removed_parts(workspace, 3))
    queries = responses_of(workspace, parts, whole=True)
    rows = np.array([int(name) for name in queries.names])
    assert len(set(rows)) == len(rows)
    scored = np.array([chunks.chunk(row)[1].any() for row in range(n)])
    for part in parts:
        assert part[rows].sum() == min(16, (part & scored).sum())
    for row, ids, weights in zip(rows, queries.ids, queries.weights, strict=True):
        np.testing.assert_array_equal(ids, chunks.chunk(row)[0])
        assert weights.any()


@pytest.mark.parametrize(("documents", "models"), [(39, 3), (40, 6)])
def test_too_little_to_take_tenths_of_is_refused(chunks: ChunkReader, documents: int, models: int) -> None:
    workspace = _workspace(chunks, np.arange(documents))
    with pytest.raises(UsageError, match="tenths of"):
        removed_parts(workspace, models)
