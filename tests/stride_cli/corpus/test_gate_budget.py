"""How many gates the default operators have, over the range of K."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stride_cli.corpus.gate_budget import (
    MOST_PROJECTED,
    basis_bytes,
    check_projection,
    default_gates,
    default_projection,
    inside_gates,
    logit_gates,
    pair_gates,
    steered_blocks,
)


@given(n_subsets=st.integers(1, 65_535))
def test_memory_is_bounded_and_no_space_is_empty(n_subsets: int) -> None:
    for finetuned in (False, True):
        inside = inside_gates(n_subsets, finetuned=finetuned)
        for few in (False, True):
            logit = logit_gates(n_subsets, inside, 2, finetuned=few)
            assert inside >= 4096 and logit >= 4096
            assert n_subsets * (inside + 2 * logit) <= 1 << 30
        assert inside <= inside_gates(n_subsets, finetuned=finetuned, adapted=True) <= (1 << 29) // n_subsets
    assert 4096 <= pair_gates(n_subsets) <= max(4096, (1 << 28) // n_subsets)


@given(
    fewer=st.integers(1, 65_534), more=st.integers(1, 65_535), tokens=st.sampled_from([0, 9000, 10**6, 10**9])
)
def test_more_subsets_never_mean_more_gates_each(fewer: int, more: int, tokens: int) -> None:
    fewer, more = sorted((fewer, more))
    assert default_gates(fewer, tokens) >= default_gates(more, tokens)
    assert default_gates(fewer, 0) >= default_gates(fewer, tokens)  # an unknown corpus may be large


@given(n_chunks=st.integers(0, 10**9), n_gates=st.integers(1, 1 << 23), finetuned=st.booleans())
def test_projections_are_bounded_and_of_few_chunks_no_larger_than_their_gates(
    n_chunks: int, n_gates: int, finetuned: bool
) -> None:
    size = default_projection(n_chunks, n_gates, finetuned=finetuned)
    check_projection(size)
    assert 512 <= size <= MOST_PROJECTED and (size == 512 or size * n_chunks <= 1 << 30)
    assert size <= 32_768 or (finetuned and 8 * size <= n_gates <= 1 << 20)
    assert size <= default_projection(n_chunks // 2, n_gates, finetuned=finetuned)


def test_bases_are_as_large_as_those_that_were_written() -> None:
    """SmolLM2-135M fine-tuned on 480 pairs, and the tests' own model of 2 layers trained on 60 documents."""
    assert basis_bytes(32, 30, 576, finetuned=True) == pytest.approx(6_138_240 + 2_292_480, rel=0.01)
    assert basis_bytes(60, 2, 64) == 262_144 + 32_768


@given(st.integers(1, 200))
def test_deep_models_are_steered_in_blocks_at_equal_distances(n_layers: int) -> None:
    blocks = steered_blocks(n_layers)
    assert blocks[0] == n_layers - 1 and 0 <= blocks[-1] < n_layers / 8
    assert len(blocks) == n_layers if n_layers < 16 else 8 <= len(blocks) <= 12
    assert [*steered_blocks(30)] == [*range(29, 0, -3)]
