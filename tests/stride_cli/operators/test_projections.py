"""Projections against linear algebra written out, and of a real model against its chunks' own gradients."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stride_cli.attribution.direct import Exact, exact_products, influence_unit
from stride_cli.attribution.estimates import Estimate
from stride_cli.attribution.pipeline import average_influence
from stride_cli.data.batches import ChunkReader, pad_batch
from stride_cli.data.query_set import QuerySet
from stride_cli.data.workspace import Workspace
from stride_cli.operators.closed import ClosedSettings, fit_closed
from stride_cli.operators.fit_kernels import turn
from stride_cli.operators.linear_response import measure_linear
from stride_cli.operators.projections import Folding, Projections, bit_planes, encode, scan
from stride_cli.operators.steered_model import SteeredModel
from stride_cli.operators.store import Operators

K, DEGREE, BYTES = 24, 3, 128


@pytest.fixture(scope="module")
def columns() -> np.ndarray:
    random = np.random.default_rng(1)
    return np.stack([np.sort(random.choice(K, DEGREE, replace=False)) for _ in range(40)]).astype(np.uint16)


def settings_for(**changes) -> ClosedSettings:
    ranks = {"mlp-matrix": 4, "logit": 4}
    return ClosedSettings(spaces=("mlp-matrix", "logit"), layer=2, ranks=ranks, batch_tokens=96, **changes)


@pytest.fixture(scope="module")
def fitted(model, chunks: ChunkReader, columns: np.ndarray) -> Operators:
    return fit_closed(model, chunks, columns, K, settings_for(project=BYTES))


@pytest.fixture(scope="module")
def asked(chunks: ChunkReader):
    pairs = [chunks.chunk(row) for row in (3, 17, 30)]
    return pad_batch(np.arange(3), [pair[0] for pair in pairs], [pair[1] for pair in pairs])


@given(
    sizes=st.lists(st.integers(1, 5_000), min_size=1, max_size=3),
    count=st.sampled_from((64, 192, 1 << 14)),
    seed=st.integers(0, 99),
)
@settings(max_examples=25, deadline=None)
def test_folding_is_linear_and_spreads_every_gate(sizes: list[int], count: int, seed: int) -> None:
    total = sum(sizes)
    folding = Folding(total, count, seed)
    random = torch.Generator().manual_seed(seed)
    rows = [torch.randn(2, size, generator=random) for size in sizes]
    assert folding(rows).shape == (2, count)
    np.testing.assert_array_equal(folding([2.0 * row for row in rows]), 2.0 * folding(rows))
    # one gate at a time: a unit vector, of which nothing is a large part
    space = seed % len(sizes)
    unit = [torch.zeros(1, size) for size in sizes]
    unit[space][0, seed % sizes[space]] = 1.0
    found = np.abs(folding(unit)[0])
    assert np.square(found).sum() == pytest.approx(1.0, rel=1e-5)
    if count == 192:  # turned twice, what lies in the middle
        assert (found > 1e-6).sum() >= 64 and found.max() < 0.6
    else:
        assert np.ptp(found) == 0
    again = Folding(total, count, seed + 1)
    assert total < 9 or not np.array_equal(again(rows), folding(rows))


@given(
    before=st.integers(0, 99),
    after=st.integers(0, 99),
    order=st.integers(3, 14),
    rows=st.integers(0, 4),
    seed=st.integers(0, 99),
)
@settings(max_examples=25, deadline=None)
def test_turning_is_the_product_with_a_hadamard_matrix(
    before: int, after: int, order: int, rows: int, seed: int
) -> None:
    from scipy.linalg import hadamard

    length = 1 << order
    count = before + length + after
    numbers = np.random.default_rng(seed).normal(size=(rows, count)).astype(np.float32)
    found = numbers.copy()
    turn(found, before, length)
    within = slice(before, before + length)
    expected = numbers[:, within].astype(float)
    for each in range(order):  # a Kronecker product of matrices of order 2
        pairs = expected.reshape(rows, length >> (each + 1), 2, 1 << each)
        low, high = pairs[:, :, 0], pairs[:, :, 1]
        expected = (np.stack([low + high, low - high], axis=2) / 2**0.5).reshape(rows, length)
    if order < 10:
        whole = numbers[:, within] @ hadamard(length) / length**0.5
        np.testing.assert_allclose(expected, whole, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(found[:, within], expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(np.delete(found, within, 1), np.delete(numbers, within, 1))


@pytest.mark.parametrize("size", [5000, 300])
def test_estimates_are_unbiased(size: int) -> None:
    """Over foldings: a product of .5, with the noise of 8 b numbers and of what rounding to signs adds, which
    is as large as they say; also where gates are fewer than signs."""
    random = torch.Generator().manual_seed(0)
    pair = torch.nn.functional.normalize(torch.randn(2, size, generator=random), dim=1)
    own, asked = pair[:1], 0.5 * pair[:1] + 0.75**0.5 * pair[1:]
    expected = float(own @ asked.T)
    found, stated = [], []
    for seed in range(300):
        codes, step = encode(Folding(size, 1024, seed)([own]))
        estimated = Projections(codes, step, seed).asked([asked])
        products, noise = estimated.estimates(0, len(codes)), estimated.noise
        found.append(float(products[0, 0]))
        stated.append(float(noise[0] * step[0]))
    assert np.mean(found) == pytest.approx(expected, abs=4 * np.std(found) / 300**0.5)
    assert np.std(found) < 2 * 1024**-0.5
    if size > 1024:  # else gates meet in several places, and errors are smaller than stated
        assert np.std(found) == pytest.approx(np.mean(stated), rel=0.15)
    assert np.std(found) < 1.15 * np.mean(stated)


@given(
    size=st.integers(1, 12).map(lambda words: 8 * words),
    count=st.integers(0, 40),
    queries=st.integers(1, 11),
    seed=st.integers(0, 99),
)
@settings(max_examples=40, deadline=None)
def test_the_scan_is_the_product_of_signs_with_rounded_numbers(
    size: int, count: int, queries: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    z = random.normal(size=(count, 8 * size)) * random.exponential(size=(count, 1))
    z[: count // 4] = 0.0
    codes, step = encode(z.astype(np.float32))
    assert codes.shape == (count, size) and codes.dtype == np.uint8 and step.dtype == np.float32
    sums = np.abs(z).sum(axis=1)
    np.testing.assert_allclose(step * np.maximum(sums, 1e-9), np.square(z).sum(axis=1), rtol=1e-4)
    numbers = random.normal(size=(queries, 8 * size)).astype(np.float32)
    planes, units, sizes = bit_planes(numbers)
    bits = np.unpackbits(planes.view(np.uint8), axis=2).reshape(queries, 3, 8 * size).astype(int)
    rounded = units[:, None] * np.tensordot(2 * bits - 1, [1, 2, 4], (1, 0))
    assert (np.corrcoef(np.r_[rounded, numbers])[:queries, queries:].diagonal() > 0.9).all()
    np.testing.assert_allclose((rounded * numbers).sum(axis=1), np.square(numbers).sum(axis=1), rtol=1e-4)
    np.testing.assert_allclose(sizes, np.linalg.norm(rounded, axis=1), rtol=1e-5)
    found = np.empty((queries, count), np.float32)
    scan(codes, step, planes, units, found)
    expected = rounded @ (np.where(z > 0, 1, -1) * step[:, None]).T
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_they_tell_influences_of_chunks(model, chunks: ChunkReader, columns, fitted, asked) -> None:
    steered = SteeredModel.of(model, fitted)
    responses = measure_linear(steered, asked)
    sizes = np.bincount(columns.reshape(-1), minlength=K)
    rows = np.arange(chunks.n_chunks)
    unit = influence_unit(fitted, workspace_of(model, chunks), sizes)
    offsets = average_influence(responses, sizes)
    products = exact_products(steered, [asked], chunks, rows)
    exact = unit * products - offsets[:, None]
    found = Estimate.of(steered, queries_of(chunks), [asked], workspace_of(model, chunks))
    for query in range(3):
        none = Exact(np.empty(0, np.int64), np.empty(0), unit, offsets[query])
        own = found[query].given(none)
        assert np.corrcoef(exact[query], own.prior.means)[0, 1] > 0.3
        assert own.prior.means.argmax() == [3, 17, 30][query]  # each query is a chunk of the corpus
        # estimates are off by as much as they say, in the unit of exact values
        values, errors = own.projected(0, chunks.n_chunks)
        some = errors > 0
        assert 0.6 < np.sqrt(np.mean(np.square((values - exact[query])[some] / errors[some]))) < 1.6
        every = Exact(rows, products[query], unit, offsets[query])
        whole = found[query].given(every).prior
        np.testing.assert_allclose(whole.means, exact[query])
        assert not whole.spreads.any()


def queries_of(chunks: ChunkReader) -> QuerySet:
    rows = [3, 17, 30]
    ids, weights = zip(*(chunks.chunk(row) for row in rows), strict=True)
    return QuerySet(ids, weights, [str(row) for row in rows])


def workspace_of(model, chunks: ChunkReader) -> Workspace:
    return Workspace(None, model, chunks, 0)
