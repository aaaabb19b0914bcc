"""What tokens count as on average over training: against integrals, sums of tokens' gradients, and causes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stride_cli.data.batches import BEFORE, ChunkReader, packed, unpacked
from stride_cli.operators.gradients import chunk_gradients, gate_gradients
from stride_cli.operators.initial_residuals import average_residuals, measure_initial_residuals
from stride_cli.operators.steered_model import SteeredModel
from tests.stride_cli.operators.test_gradients import LAYER, make_space
from tests.tiny_chunks import MemoryIndex, tiny_model


def test_a_token_counts_as_in_the_mean_of_both_ends() -> None:
    now = torch.tensor([0.3, 0.3, 0.3, 1e-6, 0.0], dtype=torch.float64)
    before = torch.tensor([0.9, 0.3, 0.1, 1.0, 1.0])
    found = average_residuals(now, before).double()
    torch.testing.assert_close(found[:4] * now[:4], (now[:4] + before[:4]) / 2, rtol=1e-6, atol=0.0)
    assert torch.isfinite(found).all()
    torch.testing.assert_close(average_residuals(now)[:2], torch.full((2,), (1 + 0.3) / 0.6))


@given(st.lists(st.floats(2.0**-31, 1.0), min_size=1, max_size=20))
def test_a_byte_holds_a_residual_to_4_5_percent(values: list[float]) -> None:
    given = np.array(values)
    assert np.abs(np.log(unpacked(packed(given)) / given)).max() <= np.log(2) / 16 + 1e-6
    assert np.array_equal(packed(unpacked(packed(given))), packed(given))


@pytest.mark.parametrize("name", ["mlp-matrix", "residual-matrix", "token-logit", "pair-logit"])
@pytest.mark.parametrize("known", [False, True])
def test_a_chunk_is_the_sum_of_its_tokens_each_as_it_was_on_average(model, name: str, known: bool) -> None:
    index = MemoryIndex(3)
    if known:
        random = np.random.default_rng(1)
        index.arrays[BEFORE] = random.integers(0, 60, len(index.arrays["corpus/tokens"])).astype(np.uint8)
    chunks = ChunkReader(index)
    steered = SteeredModel(model, [make_space(model, name)], LAYER, averaged=True)
    batch = chunks.batch(np.arange(3))
    (found,), loss = chunk_gradients(steered, batch)
    (plain,), loss_plain = gate_gradients(steered, batch)
    torch.testing.assert_close(loss, loss_plain, rtol=0, atol=0)
    wanted = torch.zeros_like(found)
    for row in range(3):
        for place in torch.nonzero(batch.weights[row]).flatten().tolist():
            alone = torch.zeros_like(batch.weights[row : row + 1])
            alone[0, place] = 1.0
            one = replace(batch.take(slice(row, row + 1)), weights=alone)
            (gradient,), surprise = gate_gradients(steered, one)
            before = 1.0 if batch.before is None else float(batch.before[row, place])
            factor = average_residuals(-torch.expm1(-surprise), before)
            wanted[row] += (factor[:, None] * gradient)[0] / batch.scored[row]
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5 * float(wanted.abs().max()))
    if known:  # from nothing, an untrained model has not moved
        assert (found - plain).norm() > 0.1 * plain.norm()


def test_chunks_gradients_are_brought_to_one_length_as_far_as_asked(model) -> None:
    chunks = ChunkReader(MemoryIndex(6))
    spaces = [make_space(model, "mlp-matrix"), make_space(model, "token-logit")]
    batch = chunks.batch(np.arange(6))
    plain, _ = chunk_gradients(SteeredModel(model, spaces, LAYER, averaged=True), batch)
    lengths = torch.cat(plain, dim=1).norm(dim=1) * batch.scored
    assert lengths.max() > 1.2 * lengths.min()
    for power in (0.25, 1.0):
        steered = SteeredModel(model, spaces, LAYER, averaged=True, normalized=power)
        found, _ = chunk_gradients(steered, batch)
        for one, other in zip(found, plain, strict=True):
            torch.testing.assert_close(one, other / lengths[:, None] ** power)
    empty = replace(batch, weights=torch.zeros_like(batch.weights))
    assert all(not each.any() for each in chunk_gradients(steered, empty)[0])


@pytest.mark.parametrize("masked", [False, True])
def test_the_model_before_training_says_how_far_it_was(tmp_path: Path, masked: bool) -> None:
    base, chunks = tiny_model(seed=5), ChunkReader(MemoryIndex(23, masked=masked))
    found = measure_initial_residuals(base, chunks, batch_tokens=64)
    for row in range(23):
        ids, weights = chunks.chunk(row)
        logits = base.model(input_ids=torch.from_numpy(ids.astype(np.int64))[None]).logits[0].double()
        p = logits.softmax(-1)[np.arange(len(ids) - 1), ids[1:].astype(np.int64)].detach().numpy()
        wanted = np.where(weights[1:] > 0, 1 - p, 1.0)
        start = chunks.offsets[row]
        assert np.abs(np.log2(unpacked(found[start + 1 : start + len(ids)]) / wanted)).max() < 1 / 16 + 1e-4
        assert found[start] == 0
    # interrupted after its first batches, it gives the same
    whole = np.array(measure_initial_residuals(base, chunks, batch_tokens=64, scratch=tmp_path))
    assert np.array_equal(whole, found)
    first = chunks.plan(64)[0]
    left = np.concatenate([np.arange(chunks.offsets[row], chunks.offsets[row + 1]) for row in first])
    half = torch.full((len(found),), 77, dtype=torch.uint8)
    half[left] = torch.from_numpy(found[left])
    torch.save({"next": 1, "before": half}, tmp_path / "before.pt")
    assert np.array_equal(measure_initial_residuals(base, chunks, batch_tokens=64, scratch=tmp_path), found)
