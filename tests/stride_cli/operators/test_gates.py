"""Packed gates: against the matrix they stand for, and what rounding does to measurements."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stride_cli.data.batches import ChunkReader
from stride_cli.operators import store
from stride_cli.operators.closed import ClosedSettings, fit_closed
from stride_cli.operators.gates import PackedGates, combined_gates, gate_responses, gate_rows, widened
from stride_cli.operators.steered_model import SteeredModel

K = 40


def matrix(count: int, size: int, seed: int) -> np.ndarray:
    """Rows of very different lengths, heavy tails, some rows and stretches zero."""
    random = np.random.default_rng(seed)
    values = random.standard_t(3, (count, size)) * 10.0 ** random.integers(-6, 7, (count, 1))
    values[random.random(count) < 0.2] = 0
    values[:, : size // 3] *= random.random() < 0.5
    return values.astype(np.float32)


@given(count=st.integers(1, 40), size=st.integers(1, 700), queries=st.integers(1, 7), seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_packed_gates_act_as_the_rounded_matrix(count: int, size: int, queries: int, seed: int) -> None:
    plain = matrix(count, size, seed)
    packed = PackedGates.of(plain)
    rounded = gate_rows(packed, slice(None))
    assert rounded.dtype == np.float32 and packed.shape == plain.shape and len(packed) == count
    as_on_a_device = widened(torch.from_numpy(packed.values), torch.from_numpy(packed.scale))
    np.testing.assert_array_equal(as_on_a_device.numpy(), rounded)
    # half a step of the block's scale at most
    steps = np.repeat(packed.scale, 256, axis=1)[:, :size]
    assert (np.abs(rounded - plain) <= 0.5001 * steps).all()
    gradients = np.random.default_rng(seed).standard_normal((queries, size)).astype(np.float32)
    exact = gradients.astype(np.float64) @ rounded.T.astype(np.float64)
    # half a step of 16 bits, of the largest of a block
    largest = np.maximum.reduceat(np.abs(gradients), np.arange(0, size, 256), axis=1)
    halves = np.repeat(largest, 256, axis=1)[:, :size] / 65_000
    bound = (halves + 1e-6 * np.abs(gradients)) @ np.abs(rounded).T + 1e-30
    found = gate_responses(packed, gradients)
    assert (np.abs(found - exact) <= bound).all()
    # whatever else is asked for with it
    np.testing.assert_array_equal(found[-1:], gate_responses(packed, gradients[-1:]))
    weights = np.random.default_rng(seed).standard_normal(count)
    expected = weights @ rounded.astype(np.float64)
    assert (
        np.abs(combined_gates(packed, weights) - expected) <= 1e-5 * np.abs(weights) @ np.abs(rounded)
    ).all()


def test_rounding_hardly_moves_what_subsets_measure(
    model, chunks: ChunkReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stride_cli.operators.exact_response import measure_exact
    from stride_cli.operators.linear_response import measure_linear

    columns = np.stack([np.random.default_rng(i).choice(K, 3, replace=False) for i in range(chunks.n_chunks)])
    chosen = ClosedSettings(
        spaces=("mlp-matrix", "logit", "token-logit"),
        layer=2,
        ranks={"mlp-matrix": 24, "logit": 24, "token-logit": 24},
    )
    operators = fit_closed(model, chunks, columns.astype(np.uint16), K, chosen)
    monkeypatch.setattr(store, "PACKED_BYTES", 0)
    arrays, attributes = operators.to_arrays()
    packed = store.Operators.from_arrays(arrays, attributes)
    assert all(isinstance(gate, PackedGates) for gate in packed.gates)
    assert sum(g.nbytes for g in packed.gates) < 0.27 * sum(g.nbytes for g in operators.gates)
    batch = chunks.batch(np.arange(6))
    for measure in (measure_linear, measure_exact):
        before, after = (measure(SteeredModel.of(model, each), batch) for each in (operators, packed))
        assert (np.abs(after - before).max(axis=1) < 0.08 * before.std(axis=1)).all()
        assert (np.sqrt(np.square(after - before).mean(axis=1)) < 0.02 * before.std(axis=1)).all()
