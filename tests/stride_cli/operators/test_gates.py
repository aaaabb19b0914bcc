"""Packed gates: against the matrix they stand for, and what rounding does to measurements."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stride_cli.data.batches import ChunkReader
from stride_cli.operators import store
from stride_cli.operators.closed import ClosedSettings, fit_closed
from stride_cli.operators.gates import PackedGates, combined_gates, gate_responses, gate_rows
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
    packed = PackedGates.of(plain, bits=1 + seed % 4)
    rounded = gate_rows(packed, slice(None)).astype(np.float64)
    assert packed.shape == plain.shape and len(packed) == count
    squares = np.square(plain.astype(np.float64)).sum(axis=1)
    # the product with the row itself is its square, whatever was rounded away
    np.testing.assert_allclose((rounded * plain).sum(axis=1), squares, rtol=1e-3)
    gradients = np.random.default_rng(seed).standard_normal((queries, size)).astype(np.float32)
    found, exact = gate_responses(packed, gradients), gradients @ rounded.T
    # three bits of a query's numbers are a fifth of its length away, in any direction
    lengths = np.linalg.norm(gradients, axis=1)[:, None] * np.linalg.norm(rounded, axis=1)
    assert (np.abs(found - exact) <= 0.5 * lengths + 1e-30).all()
    # whatever else is asked for with it
    np.testing.assert_array_equal(found[-1:], gate_responses(packed, gradients[-1:]))
    weights = np.random.default_rng(seed).standard_normal(count)
    error = np.abs(combined_gates(packed, weights) - weights @ rounded)
    assert (error <= 1e-5 * (np.abs(weights) @ np.abs(rounded)).max()).all()


def test_rounding_hardly_moves_what_subsets_measure(
    model, chunks: ChunkReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stride_cli.operators.linear_response import gradients_with_loss, measure_linear
    from stride_cli.research.paper.exact_response import measure_exact

    columns = np.stack([np.random.default_rng(i).choice(K, 3, replace=False) for i in range(chunks.n_chunks)])
    chosen = ClosedSettings(
        spaces=("mlp-matrix", "logit", "token-logit"),
        layer=2,
        ranks={"mlp-matrix": 24, "logit": 24, "token-logit": 24},
    )
    operators = fit_closed(model, chunks, columns.astype(np.uint16), K, chosen)
    monkeypatch.setattr(store, "PACKED_BYTES", 0)
    monkeypatch.setattr(store, "LARGE_BASIS", 0)
    arrays, attributes = operators.to_arrays()
    packed = store.Operators.from_arrays(arrays, attributes)
    # bases have a byte a number, with three digits and a range of 2¹⁷
    for before, after in zip(operators.spaces, packed.spaces, strict=True):
        for name, values in before.arrays().items():
            if values.dtype == np.float32:
                bound = np.abs(values) / 16 + np.abs(values).max() / (1 << 17)
                assert (np.abs(after.arrays()[name] - values) <= bound).all()
                assert arrays[f"{before.name.replace('-', '_')}_{name}_codes"].nbytes == values.size
    assert all(isinstance(gate, PackedGates) for gate in packed.gates)
    assert sum(g.nbytes for g in packed.gates) < 0.15 * sum(g.nbytes for g in operators.gates)
    batch = chunks.batch(np.arange(6))
    gradients = gradients_with_loss(SteeredModel.of(model, operators), batch)[0]
    # rounding is random in the gates: of the product of lengths no more than the root of their number
    both = operators.gates, [np.asarray(each) for each in gradients]
    a, g = (np.sqrt(sum(np.square(part).sum(axis=1) for part in each)) for each in both)
    unit = g[:, None] * np.maximum(a, a.mean()) / np.sqrt(min(gate.shape[1] for gate in operators.gates))
    for measure in (measure_linear, measure_exact):
        before, after = (measure(SteeredModel.of(model, each), batch) for each in (operators, packed))
        assert np.sqrt(np.square((after - before) / unit).mean()) < 0.3
        assert min(np.corrcoef(x, y)[0, 1] for x, y in zip(before, after, strict=True)) > 0.95
