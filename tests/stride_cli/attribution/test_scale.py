"""What influences are in nats: the fit, and what models are trained without."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stride_cli.attribution.scale import fit_scale, own_responses, removed_parts
from stride_cli.data.batches import ChunkReader
from stride_cli.data.workspace import Workspace
from stride_cli.errors import UsageError


@given(st.floats(1e-6, 1e6), st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_the_slope_is_found_within_its_error(slope: float, seed: int) -> None:
    random = np.random.default_rng(seed)
    predicted = random.exponential(size=(3, 96)) * (random.random((3, 96)) < 0.3)
    noise = 0.1 * slope * random.normal(size=predicted.shape)
    found = fit_scale(predicted, slope * predicted + noise)
    assert abs(found.slope - slope) < 6 * found.error and found.error < 0.1 * slope
    assert found.sure and found.correlation > 0.9 and (found.models, found.pairs) == (3, 288)
    exact = fit_scale(predicted, slope * predicted)
    assert exact.slope == pytest.approx(slope) and exact.error < 1e-6 * slope


def test_what_predicts_nothing_is_not_sure() -> None:
    random = np.random.default_rng(0)
    predicted, measured = random.exponential(size=(2, 3, 60))
    unsure = [
        fit_scale(predicted, random.normal(size=(3, 60))).sure
        for predicted in random.normal(size=(200, 3, 60))
    ]
    assert np.mean(unsure) < 0.02  # three standard errors
    assert not fit_scale(predicted, -measured).sure
    nothing = fit_scale(np.zeros((3, 60)), measured)
    assert nothing.slope == 0 and not nothing.sure


def _workspace(chunks: ChunkReader, documents: np.ndarray) -> Workspace:
    index = SimpleNamespace(array=lambda name: {"corpus/chunk_document": documents}[name])
    return Workspace(index, None, chunks, 5)


def test_parts_are_tenths_of_the_documents_and_have_responses_in_them(chunks: ChunkReader) -> None:
    n = chunks.n_chunks
    assert n >= 40
    workspace = _workspace(chunks, np.arange(n))
    parts = removed_parts(workspace, 3)
    assert parts.shape == (3, n) and (parts.sum(axis=1) == round(n / 10)).all()
    assert parts.sum(axis=0).max() == 1  # none of them twice
    np.testing.assert_array_equal(parts, removed_parts(workspace, 3))
    queries = own_responses(workspace, parts)
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
