"""How queries are asked together."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stride_cli.attribution import attributor
from stride_cli.attribution.attributor import queries_together

CPU = torch.device("cpu")
SMALLEST = 1 << 29  # bytes that gradients may take of any memory


@given(
    n_chunks=st.integers(1, 10**9),
    gate_size=st.integers(1, 10**8),
    free=st.one_of(st.none(), st.integers(0, 1 << 40)),
)
def test_as_many_queries_as_memory_has_room_for(n_chunks: int, gate_size: int, free: int | None) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attributor, "available_bytes", lambda: free)
        count = queries_together(n_chunks, gate_size, CPU)
        patch.setattr(attributor, "available_bytes", lambda: 0)
        least = queries_together(n_chunks, gate_size, CPU)
    assert 1 <= least <= count
    if count > 1:
        assert 4 * gate_size * count <= max(SMALLEST, (free or 0) // 8)
        assert n_chunks * count <= 1 << 27


def test_null_prompts_of_a_small_model_are_asked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """100 of them, cut to three lengths; of 16 GB on, with the default's gates."""
    monkeypatch.setattr(attributor, "available_bytes", lambda: 17 << 30)
    assert queries_together(2000, 600_421, CPU) >= 300
    # a model of 135 M parameters at all of its layers
    assert queries_together(480, 4_218_294, CPU) >= 100
    # what else runs takes some, and changes nothing
    some = queries_together(480, 4_218_294, CPU)
    monkeypatch.setattr(attributor, "available_bytes", lambda: 30 << 30)
    assert queries_together(480, 4_218_294, CPU) == some
