"""Sketches against linear algebra written out, and of a real model against its chunks' own gradients."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stride_cli.attribution.direct_readout import chunk_influences, second_estimates, sketched_influences
from stride_cli.attribution.shared_pairs import shared_pairs
from stride_cli.corpus.gate_budget import sketch_bytes
from stride_cli.data.batches import ChunkReader, pad_batch
from stride_cli.data.query_set import QuerySet
from stride_cli.data.workspace import Workspace
from stride_cli.operators import sketch_fit as module
from stride_cli.operators.closed import ClosedSettings, fit_closed
from stride_cli.operators.gates import PackedGates, gate_rows
from stride_cli.operators.gradients import gate_gradients
from stride_cli.operators.linear_response import measure_linear
from stride_cli.operators.sketch_fit import fit_sketches, principal_directions
from stride_cli.operators.sketches import Folding, Sketches, encode
from stride_cli.operators.steered_model import SteeredModel
from stride_cli.operators.store import Operators

K, DEGREE, BITS = 24, 3, 36


@pytest.fixture(scope="module")
def columns() -> np.ndarray:
    random = np.random.default_rng(1)
    return np.stack([np.sort(random.choice(K, DEGREE, replace=False)) for _ in range(40)]).astype(np.uint16)


def settings_for(**changes) -> ClosedSettings:
    ranks = {"mlp-matrix": 4, "logit": 4}
    return ClosedSettings(spaces=("mlp-matrix", "logit"), layer=2, ranks=ranks, batch_tokens=96, **changes)


@pytest.fixture(scope="module")
def fitted(model, chunks: ChunkReader, columns: np.ndarray) -> Operators:
    return fit_closed(model, chunks, columns, K, settings_for(sketch=BITS))


@pytest.fixture(scope="module")
def asked(chunks: ChunkReader):
    pairs = [chunks.chunk(row) for row in (3, 17, 30)]
    return pad_batch(np.arange(3), [pair[0] for pair in pairs], [pair[1] for pair in pairs])


@given(sizes=st.lists(st.integers(1, 20_000), min_size=1, max_size=3), seed=st.integers(0, 99))
@settings(max_examples=25, deadline=None)
def test_folding_adds_every_gate_to_one_place_with_a_sign(sizes: list[int], seed: int) -> None:
    folding = Folding(sizes, seed)
    random = torch.Generator().manual_seed(seed)
    rows = [torch.randn(2, size, generator=random) for size in sizes]
    assert folding(rows).shape == (2, 8192)
    torch.testing.assert_close(folding([2.0 * row for row in rows]), 2.0 * folding(rows))
    # one gate at a time: a unit vector, up to its sign
    space = seed % len(sizes)
    unit = [torch.zeros(1, size) for size in sizes]
    unit[space][0, seed % sizes[space]] = 1.0
    assert folding(unit).abs().sum() == folding(unit).abs().max() == 1.0
    if sum(sizes) <= 8192 and len(sizes) == 1:  # nothing falls together
        torch.testing.assert_close(folding(rows) @ folding(rows).T, rows[0] @ rows[0].T, rtol=1e-3, atol=1e-2)
    again = Folding(sizes, seed + 1)
    assert sum(sizes) < 9 or not torch.equal(again(rows), folding(rows))


def test_products_of_folded_rows_are_those_of_the_gates_up_to_noise() -> None:
    rows = torch.randn(60, 200_000, generator=torch.Generator().manual_seed(0))
    folded = Folding([200_000], 3)([rows])
    noise = (folded @ folded.T - rows @ rows.T) / 200_000
    assert float(noise.std()) == pytest.approx(8192**-0.5, rel=0.2) and abs(float(noise.mean())) < 1e-3


def test_directions_are_the_leading_singular_vectors() -> None:
    random = np.random.default_rng(0)
    left = np.linalg.qr(random.normal(size=(300, 40)))[0]
    right = np.linalg.qr(random.normal(size=(200, 40)))[0]
    rows = (left * 0.8 ** np.arange(40)) @ right.T
    found = principal_directions(torch.from_numpy(rows).float(), 8, seed=1)
    assert found.shape == (8, 200)
    np.testing.assert_allclose(np.abs(found @ right[:, :8]), np.eye(8), atol=1e-3)
    assert (found[np.arange(8), np.abs(found).argmax(axis=1)] > 0).all()
    before = torch.get_rng_state()
    np.testing.assert_array_equal(found, principal_directions(torch.from_numpy(rows).float(), 8, seed=1))
    assert torch.equal(before, torch.get_rng_state())
    assert principal_directions(torch.ones(3, 200), 8, seed=1).shape == (3, 200)


@given(bits=st.integers(1, 40), count=st.integers(1, 9), seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_what_is_kept_is_signs_and_their_mean_size(bits: int, count: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    z = random.normal(size=(count, bits)) * random.exponential(size=(count, 1))
    codes, step = encode(z)
    assert codes.shape == (count, -(-bits // 8)) and codes.dtype == np.uint8
    directions = random.normal(size=(bits, 8192)).astype(np.float32)
    asked = torch.from_numpy(random.normal(size=(2, 90)).astype(np.float32))
    packed = PackedGates.of(directions)
    own = Folding([90], 5)([asked]).numpy() @ gate_rows(packed, slice(None)).T
    expected = own @ (np.where(z > 0, 1, -1) * np.abs(z).mean(axis=1, keepdims=True)).T
    found = Sketches(codes, step, packed, 5).products([asked])
    np.testing.assert_allclose(found, expected, atol=2e-3 * np.abs(own).sum(axis=1).max() * step.max())


def test_they_tell_influences_of_chunks(model, chunks: ChunkReader, columns, fitted, asked) -> None:
    """Nearly as many bits as chunks: correlated with what the chunks' own gradients say."""
    steered = SteeredModel.of(model, fitted)
    responses = measure_linear(steered, asked)
    sizes = np.bincount(columns.reshape(-1), minlength=K)
    rows = np.arange(chunks.n_chunks)
    exact = chunk_influences([steered], [asked], chunks, rows, responses, sizes)
    found = sketched_influences([steered], [asked], chunks.n_chunks)
    assert found is not None
    for a, b in zip(exact, found, strict=True):
        assert np.corrcoef(a, b)[0, 1] > 0.3
    assert [int(row.argmax()) for row in found] == [3, 17, 30]  # each query is a chunk of the corpus
    np.testing.assert_allclose(found.mean(axis=1), 0, atol=1e-9)
    np.testing.assert_allclose(found.std(axis=1), 1, atol=1e-9)


def test_models_without_them_are_left_out_and_new_chunks_have_none(model, fitted, asked) -> None:
    steered = SteeredModel.of(model, fitted)
    bare = SteeredModel.of(model, replace(fitted, sketches=None))
    assert sketched_influences([bare], [asked], 40) is None
    one = sketched_influences([steered], [asked], 43)
    mixed = sketched_influences([steered, bare, steered], [asked], 43)
    assert one is not None and mixed is not None
    assert not one[:, 40:].any() and one[:, :40].any()
    np.testing.assert_allclose(mixed, one, atol=1e-9)


def test_shared_pairs_say_what_to_read_and_sketches_too(model, chunks, fitted, asked) -> None:
    rows = [3, 17, 30]
    ids, weights = zip(*(chunks.chunk(row) for row in rows), strict=True)
    queries = QuerySet(ids, weights, [str(row) for row in rows])

    def estimates(operators: Operators) -> np.ndarray:
        steered = SteeredModel.of(model, operators)
        return second_estimates([steered], queries, [asked], Workspace(None, model, chunks, 0))

    pairs, both = estimates(replace(fitted, sketches=None)), estimates(fitted)
    counted = shared_pairs(queries, chunks, model.vocab_size)
    sketched = sketched_influences([SteeredModel.of(model, fitted)], [asked], chunks.n_chunks)
    for number, row in enumerate(rows):
        assert np.corrcoef(pairs[number], counted[number])[0, 1] == pytest.approx(1.0)
        assert np.corrcoef(both[number], pairs[number] + sketched[number])[0, 1] == pytest.approx(1.0)
        assert pairs[number].argmax() == both[number].argmax() == row
    for found in (pairs, both):
        np.testing.assert_allclose(found.mean(axis=1), 0, atol=1e-9)
        np.testing.assert_allclose(found.std(axis=1), 1, atol=1e-9)


def test_they_survive_their_arrays(fitted: Operators) -> None:
    arrays, attributes = fitted.to_arrays()
    back = Operators.from_arrays(arrays, attributes).sketches
    assert back is not None and fitted.sketches is not None
    np.testing.assert_array_equal(back.codes, fitted.sketches.codes)
    np.testing.assert_array_equal(back.step, fitted.sketches.step)
    np.testing.assert_array_equal(back.directions.values, fitted.sketches.directions.values)
    assert back.seed == fitted.sketches.seed and attributes["sketch"] == back.bits == BITS
    assert back.codes.nbytes + back.step.nbytes == 40 * (5 + 4)
    kept = sum(values.nbytes for name, values in arrays.items() if name.startswith("sketch_"))
    assert kept == back.nbytes == sketch_bytes(40, BITS)


@pytest.fixture
def sketch(model, chunks: ChunkReader, fitted: Operators):
    def make(bits: int = 20, **more) -> Sketches:
        return fit_sketches(SteeredModel.of(model, fitted), chunks, bits, seed=0, batch_tokens=60, **more)

    return make


def test_an_interrupted_pass_continues_to_the_same_bits(
    sketch, chunks: ChunkReader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SAMPLE", 30)  # so that there is a pass over all of them
    whole = sketch()
    real, calls = module.gate_gradients, []

    def dies(*arguments, **keywords):
        calls.append(arguments)
        if len(calls) == most:
            raise KeyboardInterrupt
        return real(*arguments, **keywords)

    sample = len(chunks.plan(60, np.arange(30)))
    most = sample + 8
    monkeypatch.setattr(module, "gate_gradients", dies)
    with pytest.raises(KeyboardInterrupt):
        sketch(scratch=tmp_path, save_seconds=0)
    calls.clear()
    resumed = sketch(scratch=tmp_path, save_seconds=0)
    assert 0 < len(calls) < len(chunks.plan(60))
    for name in ("codes", "step"):
        np.testing.assert_array_equal(getattr(whole, name), getattr(resumed, name))
    np.testing.assert_array_equal(whole.directions.values, resumed.directions.values)


def test_a_small_corpus_is_read_once(sketch, chunks: ChunkReader, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a sample that is everything the rows are kept; read again they are the same."""
    once = sketch()
    real = module.gate_gradients
    calls = []
    monkeypatch.setattr(module, "gate_gradients", lambda *a, **k: calls.append(a) or real(*a, **k))
    again = sketch()
    assert len(calls) == len(chunks.plan(60))
    np.testing.assert_array_equal(once.codes, again.codes)


def test_more_bits_than_chunks_are_not_made(sketch, capsys: pytest.CaptureFixture[str]) -> None:
    made = sketch(100)
    assert made.bits == 40 and made.codes.shape == (40, 5)
    assert "40 bits a chunk" in capsys.readouterr().err


def test_a_chunk_is_sketched_by_its_length_as_the_fit_weighs_it(model, chunks: ChunkReader, fitted) -> None:
    """z = V h(share g), share a chunk's scored tokens by the corpus's mean; chunk by chunk."""
    sketches = fitted.sketches
    assert sketches is not None
    folding = Folding([space.gate_size for space in fitted.spaces], sketches.seed)
    directions = gate_rows(sketches.directions, slice(None))
    typical = chunks.scored_tokens() / chunks.n_chunks
    z = []
    for row in range(chunks.n_chunks):
        batch = chunks.batch(np.array([row]))
        gradients = gate_gradients(SteeredModel.of(model, fitted), batch)[0]
        z.append(folding(gradients).numpy()[0] @ directions.T * float(batch.scored[0]) / typical)
    codes, step = encode(np.stack(z))
    np.testing.assert_allclose(sketches.step, step, rtol=1e-3)
    assert (np.unpackbits(codes ^ sketches.codes, axis=1).sum(axis=1) <= 1).all()  # but for z next to 0
