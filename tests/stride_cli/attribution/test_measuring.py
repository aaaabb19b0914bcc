"""Responses of several checkpoints, each of its own subsets, as one measurement."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stride_cli.attribution.additive import additive_measurement
from stride_cli.attribution.attributor import Attributor
from stride_cli.attribution.measuring import stack_checkpoints
from stride_cli.attribution.options import RecoveryOptions
from stride_cli.data.batches import ChunkReader
from stride_cli.data.workspace import Workspace
from stride_cli.operators.designs import Designs
from stride_cli.operators.store import Operators
from stride_cli.recovery.shrinkage import Shrinkage
from tests.tiny_chunks import MemoryIndex


def drawn(seed: int, count: int, queries: int, subsets: int) -> tuple[list[np.ndarray], np.ndarray]:
    random = np.random.default_rng(seed)
    scales = np.exp(random.normal(0, 3, (count, queries, 1)))
    responses = random.normal(size=(count, queries, subsets)) * scales + random.normal(size=(count, 1, 1))
    return list(responses), random.integers(1, 9, (count, subsets))


@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.integers(1, 4), st.integers(2, 30), st.booleans())
def test_what_the_recovery_explains_is_each_ones_own_at_the_first_ones_spread(
    seed: int, count: int, queries: int, subsets: int, intercept: bool
) -> None:
    responses, sizes = drawn(seed, count, queries, subsets)
    found = stack_checkpoints(responses, sizes if intercept else None)
    assert found.shape == (queries, count * subsets)
    if intercept and count > 1:
        found = additive_measurement(found, sizes)
    elif intercept:
        found = additive_measurement(found, sizes[0])
    expected = []
    for values, own in zip(responses, sizes, strict=True):
        y = additive_measurement(values, own) if intercept else values
        first = additive_measurement(responses[0], sizes[0]) if intercept else responses[0]
        expected.append(y * (np.std(first, axis=1) / np.std(y, axis=1))[:, None])
    wanted = np.concatenate(expected, axis=1)
    np.testing.assert_allclose(found, wanted, rtol=1e-9, atol=1e-9 * np.abs(wanted).max() + 1e-12)


def test_one_checkpoint_is_left_as_it_is() -> None:
    (alone,), sizes = drawn(1, 1, 3, 8)
    assert stack_checkpoints([alone], sizes[0]) is alone


def test_the_scale_of_the_others_does_not_matter_and_that_of_the_first_does() -> None:
    (first, second), sizes = drawn(2, 2, 3, 20)
    usual = stack_checkpoints([first, second], sizes)
    np.testing.assert_allclose(stack_checkpoints([first, 1e6 * second], sizes), usual, rtol=1e-9)
    np.testing.assert_allclose(stack_checkpoints([5 * first, second], sizes), 5 * usual, rtol=1e-9)


def test_a_checkpoint_that_answers_nothing_says_nothing() -> None:
    (first, second), sizes = drawn(3, 2, 2, 20)
    silent = np.zeros_like(second)
    np.testing.assert_allclose(stack_checkpoints([first, silent], sizes), np.hstack([first, silent]))
    assert not stack_checkpoints([silent, second], sizes).any()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_stays_so(bad: float) -> None:
    (first, second), sizes = drawn(4, 2, 2, 20)
    second[1, 3] = bad
    found = stack_checkpoints([first, second], sizes)
    assert np.isfinite(found[0]).all() and not np.isfinite(found[1]).all()


@pytest.mark.parametrize("models", [1, 3])
@pytest.mark.parametrize("read", [0, 50])
def test_means_of_several_models_are_shrunk_less_unless_chunks_are_read(
    model, chunks: ChunkReader, models: int, read: int
) -> None:
    """Averaging leaves less noise in what was recovered, and does nothing for what is read."""
    operators = Operators([], [], layer=1, fit="closed", seen=np.ones(chunks.n_chunks, np.uint8))
    designs = Designs.stacked([Designs.drawn(chunks.n_chunks, 9, 2, seed) for seed in range(models)])
    workspace = Workspace(MemoryIndex(chunks.n_chunks), model, chunks, 0)
    defaults = {"shrinkage": Shrinkage(exponent=1.6, opposing=0.2), "intercept": True, "lambda_ratio": 0.1}

    def shrinkage(options: RecoveryOptions) -> Shrinkage | None:
        found = Attributor([operators] * models, lambda number: model, designs, workspace, defaults, options)
        return found.shrinkage

    found = shrinkage(RecoveryOptions(read=read))
    assert found is not None and found.opposing == 0.2
    assert found.exponent == pytest.approx(1.6 if read else 1.0 + 0.6 / models)
    assert shrinkage(RecoveryOptions(read=read, shrink=False)) is None
