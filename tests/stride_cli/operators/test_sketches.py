"""Sketches against linear algebra written out, and of a real model against its chunks' own gradients."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stride_cli.errors import NumericalError
from stride_cli.measurement.direct import chunk_influences, sketched_influences
from stride_cli.measurement.linear import measure_linear
from stride_cli.operators import sketches as module
from stride_cli.operators.batches import ChunkReader, pad_batch
from stride_cli.operators.closed import ClosedSettings, fit_closed
from stride_cli.operators.sketches import Sketches, encode, fit_sketches, principal_directions
from stride_cli.operators.store import Operators

K, DEGREE = 24, 3


@pytest.fixture(scope="module")
def columns() -> np.ndarray:
    random = np.random.default_rng(1)
    return np.stack([np.sort(random.choice(K, DEGREE, replace=False)) for _ in range(40)]).astype(np.uint16)


def settings_for(**changes) -> ClosedSettings:
    ranks = {"mlp-matrix": 4, "logit": 4}
    return ClosedSettings(spaces=("mlp-matrix", "logit"), layer=2, ranks=ranks, batch_tokens=96, **changes)


@pytest.fixture(scope="module")
def fitted(model, chunks: ChunkReader, columns: np.ndarray) -> Operators:
    return fit_closed(model, chunks, columns, K, settings_for(sketch=K))


@pytest.fixture(scope="module")
def asked(chunks: ChunkReader):
    pairs = [chunks.chunk(row) for row in (3, 17, 30)]
    return pad_batch(np.arange(3), [pair[0] for pair in pairs], [pair[1] for pair in pairs])


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    bits=st.integers(1, 12),
    seed=st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_coordinates_are_products_within_the_leading_directions(sizes, bits, seed) -> None:
    """z_i · Uᵀ y = g_i · P g_x, with P the projector on the leading right singular vectors of the gates."""
    random = np.random.default_rng(seed)
    gates = [random.normal(size=(10, size)).astype(np.float32) for size in sizes]
    A = np.concatenate(gates, axis=1).astype(np.float64)
    g, x = random.normal(size=(2, sum(sizes)))
    combination, directions = principal_directions(gates, bits)
    count = min(bits, 10, sum(sizes))
    assert combination.shape == (10, count)
    z = np.concatenate([part.numpy() for part in directions], axis=1) @ g
    leading = np.linalg.svd(A, full_matrices=False)[2][:count]
    expected = (leading @ g) @ (leading @ x)
    assert z @ (combination.T @ (A @ x)) == pytest.approx(expected, rel=1e-2, abs=1e-2)


@given(bits=st.integers(1, 40), count=st.integers(1, 9), seed=st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_what_is_kept_is_signs_and_their_mean_size(bits: int, count: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    z = random.normal(size=(count, bits)) * random.exponential(size=(count, 1))
    codes, step = encode(z)
    assert codes.shape == (count, -(-bits // 8)) and codes.dtype == np.uint8
    combination = random.normal(size=(5, bits)).astype(np.float32)
    responses = random.normal(size=(2, 5))
    expected = (responses @ combination) @ (np.where(z > 0, 1, -1) * np.abs(z).mean(axis=1, keepdims=True)).T
    found = Sketches(codes, step, combination).products(responses)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


def test_gates_of_zero_are_refused_and_a_small_rank_gives_few_bits() -> None:
    with pytest.raises(NumericalError, match="no principal directions"):
        principal_directions([np.zeros((4, 6), np.float32)], 3)
    column, row = np.arange(1, 5, dtype=np.float32)[:, None], np.ones((1, 6), np.float32)
    assert len(principal_directions([column @ row], 3)[1][0]) == 1


def test_they_tell_influences_of_chunks(model, chunks: ChunkReader, columns, fitted, asked) -> None:
    """As many bits as subsets: correlated with what the chunks' own gradients say, in the same unit."""
    responses = measure_linear(model, fitted, asked)
    sizes = np.bincount(columns.reshape(-1), minlength=K)
    exact = chunk_influences([(model, fitted)], [asked], chunks, np.arange(chunks.n_chunks), responses, sizes)
    found = sketched_influences([fitted], responses, sizes, chunks.n_chunks)
    assert found is not None
    for a, b in zip(exact, found, strict=True):
        assert np.corrcoef(a, b)[0, 1] > 0.5
        assert 0.2 < (a @ b) / (b @ b) < 5  # one unit
    assert [int(row.argmax()) for row in found] == [3, 17, 30]  # each query is a chunk of the corpus


def test_models_without_them_are_left_out_and_new_chunks_have_none(fitted, columns) -> None:
    responses = np.random.default_rng(0).normal(size=(2, 2 * K))
    sizes = np.bincount(columns.reshape(-1), minlength=K)
    bare = replace(fitted, sketches=None)
    assert sketched_influences([bare], responses[:, :K], sizes, 40) is None
    one = sketched_influences([fitted], responses[:, :K], sizes, 43)
    two = sketched_influences([fitted, fitted], responses, np.stack([sizes, sizes]), 43)
    other = sketched_influences([fitted], responses[:, K:], sizes, 43)
    assert one is not None and two is not None and other is not None
    assert not one[:, 40:].any() and one[:, :40].any()
    np.testing.assert_allclose(two, (one + other) / 2)
    mixed = sketched_influences([fitted, bare], responses, np.stack([sizes, sizes]), 43)
    np.testing.assert_array_equal(mixed, one)


def test_they_survive_their_arrays(fitted: Operators) -> None:
    back = Operators.from_arrays(*fitted.to_arrays())
    assert back.sketches is not None and fitted.sketches is not None
    for name in ("codes", "step", "combination"):
        np.testing.assert_array_equal(getattr(back.sketches, name), getattr(fitted.sketches, name))
    assert fitted.to_arrays()[1]["sketch"] == back.sketches.bits == K
    assert fitted.sketches.nbytes == 40 * (K // 8 + 4) + 4 * K * K


def test_an_interrupted_pass_continues_to_the_same_bits(
    model, chunks: ChunkReader, fitted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given_ = (model, fitted.spaces, fitted.layer, fitted.gates, chunks, 20)
    monkeypatch.setattr(module, "_CHUNKS_AT_ONCE", 7)
    whole = fit_sketches(*given_)
    real, calls = module.gradient_products, []

    def dies(*arguments, **keywords):
        calls.append(arguments)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return real(*arguments, **keywords)

    monkeypatch.setattr(module, "gradient_products", dies)
    with pytest.raises(KeyboardInterrupt):
        fit_sketches(*given_, scratch=tmp_path, save_seconds=0)
    calls.clear()
    calls.extend([()] * 10)
    resumed = fit_sketches(*given_, scratch=tmp_path, save_seconds=0)
    assert len(calls) == 10 + 3  # of six groups three were done
    np.testing.assert_array_equal(whole.codes, resumed.codes)
    np.testing.assert_array_equal(whole.step, resumed.step)


def test_more_bits_than_subsets_are_not_made(model, chunks, fitted, capsys) -> None:
    made = fit_sketches(model, fitted.spaces, fitted.layer, fitted.gates, chunks, 100)
    assert made.bits == K and made.codes.shape == (40, K // 8)
    assert f"{K} bits a chunk" in capsys.readouterr().err
    assert torch.isfinite(torch.from_numpy(made.combination)).all()
