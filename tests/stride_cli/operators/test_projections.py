"""Projections against linear algebra written out, and of a real model against its chunks' own gradients."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stride_cli.attribution import estimates as estimating
from stride_cli.attribution.direct import Exact, exact_products, influence_unit, query_gradients
from stride_cli.attribution.estimates import Estimates
from stride_cli.data.batches import ChunkReader, pad_batch
from stride_cli.data.query_set import QuerySet
from stride_cli.data.workspace import Workspace
from stride_cli.operators.closed import ClosedSettings, fit_closed
from stride_cli.operators.fit_kernels import turn
from stride_cli.operators.gradients import gate_gradients
from stride_cli.operators.linear_response import measure_linear
from stride_cli.operators.projections import (
    AskedProjections,
    Folding,
    Projections,
    Projector,
    bit_planes,
    encode,
    scan,
)
from stride_cli.operators.steered_model import SteeredModel
from stride_cli.operators.store import Operators
from stride_cli.recovery.candidates import Candidates, candidates
from stride_cli.recovery.problem import Solution
from stride_cli.research.methods.lexical import shared_pairs

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
        products, noise = Projections(codes, step, seed).products([asked])
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
    factors, offsets = influence_unit(fitted, chunks.typical, responses, sizes)
    exact = factors[:, None] * exact_products(steered, [asked], chunks, rows) - offsets[:, None]
    found = strengths(
        Estimates.of(steered, queries_of(chunks), [asked], workspace_of(model, chunks)), alone=True
    )
    for a, b in zip(exact, found, strict=True):
        assert np.corrcoef(a, b)[0, 1] > 0.3
    assert [int(row.argmax()) for row in found] == [3, 17, 30]  # each query is a chunk of the corpus
    np.testing.assert_allclose(found.mean(axis=1), 0, atol=1e-9)
    np.testing.assert_allclose(found.std(axis=1), 1, atol=1e-9)


def queries_of(chunks: ChunkReader) -> QuerySet:
    rows = [3, 17, 30]
    ids, weights = zip(*(chunks.chunk(row) for row in rows), strict=True)
    return QuerySet(ids, weights, [str(row) for row in rows])


def workspace_of(model, chunks: ChunkReader) -> Workspace:
    return Workspace(None, model, chunks, 0)


def strengths(found: Estimates, *, alone: bool = False) -> np.ndarray:
    """Of all chunks, (Q, n)."""
    each = [found.of_query(query) for query in range(len(found.together))]
    every = slice(0, found.n_chunks)
    return np.stack([own.by_projections(every) if alone else own.strength(every) for own in each])


def test_without_projections_pairs_guide_alone_and_new_chunks_have_none(model, chunks, fitted, asked) -> None:
    queries, workspace = queries_of(chunks), workspace_of(model, chunks)
    bare = Estimates.of(
        SteeredModel.of(model, replace(fitted, projections=None)), queries, [asked], workspace
    )
    pairs = shared_pairs(queries, chunks, model.vocab_size)
    for row, counted in zip(strengths(bare), pairs, strict=True):
        assert np.corrcoef(row, counted)[0, 1] == pytest.approx(1.0)
    short = replace(
        fitted,
        projections=replace(
            fitted.projections, codes=fitted.projections.codes[:33], step=fitted.projections.step[:33]
        ),
    )
    found = Estimates.of(SteeredModel.of(model, short), queries, [asked], workspace)
    last = strengths(found, alone=True)
    assert not last[:, 33:].any() and last[:, :33].std() > 0.5  # nothing is known of them: the mean
    assert last.std(axis=1) == pytest.approx(np.ones(3), abs=1e-9)
    some = Exact(Candidates(np.arange(5), np.zeros((2, 5)), 1.0), np.zeros(5), 1.0, 0.0)
    assert found.of_query(0).odds(some, np.zeros((2, 5))) is None  # of their errors nothing is known either


@pytest.mark.parametrize("rows", [3, 17])
def test_estimates_are_the_same_part_by_part(rows: int, model, chunks, fitted, asked) -> None:
    """Of projections and pairs, by parts of a few chunks, as ranges, and chunk by chunk."""
    queries, steered = queries_of(chunks), SteeredModel.of(model, fitted)

    def found() -> Estimates:
        return Estimates.of(steered, queries, [asked], workspace_of(model, chunks))

    whole, total = strengths(found()), strengths(found(), alone=True)
    # by hand: each standardised, and their sum
    products, _ = fitted.projections.products(query_gradients(steered, [asked]))
    size = np.sqrt(fitted.projections.step)
    part = np.divide(products, size, out=np.zeros_like(products), where=size > 0)
    np.testing.assert_allclose(
        total, (part - part.mean(1, keepdims=True)) / part.std(1, keepdims=True), atol=1e-5
    )
    pairs = shared_pairs(queries, chunks, model.vocab_size).astype(np.float64)
    both = (pairs - pairs.mean(1, keepdims=True)) / pairs.std(1, keepdims=True) + total
    np.testing.assert_allclose(
        whole, (both - both.mean(1, keepdims=True)) / both.std(1, keepdims=True), atol=1e-5
    )
    assert whole.argmax(axis=1).tolist() == [3, 17, 30]
    with patch.object(estimating, "_ROWS", rows):
        again = found()
    for query in range(3):
        own = again.of_query(query)
        ranges = [own.strength(slice(start, min(start + rows, 40))) for start in range(0, 40, rows)]
        np.testing.assert_allclose(np.concatenate(ranges), whole[query], atol=1e-6)
        some = np.array([0, 5, 32, 33, 39])
        np.testing.assert_allclose(own.strength(some), whole[query, some], atol=1e-6)
        np.testing.assert_allclose(own.by_projections(some), total[query, some], atol=1e-5)


def test_a_query_scans_projections_once_and_a_sample_of_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chosen to be read are those that all numbers choose."""
    from stride_cli.attribution.shared_pairs import QueryPairs

    random, n = np.random.default_rng(0), 50_000
    gradients = [torch.from_numpy(random.normal(size=(1, 700)).astype(np.float32))]
    codes, step = encode(random.normal(size=(n, 64)).astype(np.float32))
    projected = Projections(codes, step, 1).asked(gradients)
    columns = random.integers(0, 100, (n, 5)).astype(np.uint16)
    certificate = {"duality_gap": 0.0, "relative_gap": 0.0, "n_passes": 1, "n_epochs": 1, "r_squared": 0.5}
    penalty = {"intercept": 0.0, "lambda_": 1.0, "lambda_max": 2.0, "lambda_ratio": 0.5}
    solution = Solution(
        np.array([7]), np.ones(1), **penalty, **certificate, residual=random.normal(size=100), n_chunks=n
    )
    none = QueryPairs(np.empty(0, np.int64), np.empty(0), n, 0.0, 0.0)
    scanned: list[int] = []
    estimates = AskedProjections.estimates

    def counted(self: AskedProjections, start: int, stop: int, queries: slice = slice(None)) -> np.ndarray:
        scanned.append(stop - start)
        return estimates(self, start, stop, queries)

    monkeypatch.setattr(AskedProjections, "estimates", counted)

    def chosen() -> tuple[np.ndarray, np.ndarray, int, int]:
        scanned.clear()
        means, spreads = estimating._moments(projected)
        learnt = sum(scanned)
        own = estimating.Estimate(
            Estimates(n, None, projected, means, spreads, np.ones(1)), 0, none, solution
        )
        scanned.clear()
        found = candidates(columns, solution, 200, own.strength, own.by_projections)
        return np.concatenate([means, spreads]), found.chunks, learnt, sum(scanned)

    whole, all_chunks, learnt, once = chosen()
    assert learnt == once == n
    monkeypatch.setattr(estimating, "_SCANNED_TWICE", 20_000)
    monkeypatch.setattr(estimating, "_SAMPLED", 1 << 13)
    monkeypatch.setattr(estimating, "_STRETCH", 1 << 8)
    sampled, chunks, learnt, _ = chosen()
    assert learnt <= 1 << 13
    assert sampled[1] == pytest.approx(whole[1], rel=0.03)
    assert sampled[0] == pytest.approx(whole[0], abs=0.05 * whole[1])
    assert np.isin(chunks, all_chunks).mean() > 0.97


def test_a_chunk_is_projected_as_a_sum_over_its_tokens(model, chunks: ChunkReader, fitted) -> None:
    """z = h(scored_i g_i), chunk by chunk."""
    projections = fitted.projections
    assert projections is not None
    folding = Folding(fitted.gate_size, 8 * BYTES, projections.seed)
    z = []
    for row in range(chunks.n_chunks):
        batch = chunks.batch(np.array([row]))
        gradients = gate_gradients(SteeredModel.of(model, fitted), batch)[0]
        z.append(folding(gradients)[0] * float(batch.scored[0]))
    codes, step = encode(np.stack(z))
    np.testing.assert_allclose(projections.step, step, rtol=1e-3)
    assert np.unpackbits(codes ^ projections.codes, axis=1).mean() < 1e-3  # but for z next to 0


def test_projections_in_mapped_files_are_those_in_memory(tmp_path: Path) -> None:
    """What was saved says only that they are there; an older save, of a pass in memory, is taken over."""
    random = np.random.default_rng(0)
    gradients = [torch.from_numpy(random.standard_normal((30, 60)).astype(np.float32))]
    batch = pad_batch(np.arange(30), [np.arange(4)] * 30, [np.ones(4, np.float32)] * 30)
    held, mapped = Projector(60, 16, 30, 3), Projector(60, 16, 30, 3, folder=tmp_path)
    for each in (held, mapped):
        each.add(batch, gradients)
    assert mapped.state() == {} and (tmp_path / "codes").stat().st_size == 30 * 16
    again = Projector(60, 16, 30, 3, folder=tmp_path)
    again.resume({})
    (tmp_path / "older").mkdir()
    older = Projector(60, 16, 30, 3, folder=tmp_path / "older")
    older.resume(held.state())
    for each in (mapped, again, older):
        np.testing.assert_array_equal(each.projections().codes, held.projections().codes)
        np.testing.assert_array_equal(each.projections().step, held.projections().step)
