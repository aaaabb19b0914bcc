"""Gradients that are kept as 16-bit numbers: their products, how many there are, which leave."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from stride_cli.operators.kept_gradients import KeptGradients

SIZES = (700, 256, 40)


def steered() -> Any:
    return SimpleNamespace(operators=object(), spaces=[SimpleNamespace(gate_size=size) for size in SIZES])


def gradients(count: int, seed: int = 0) -> list[torch.Tensor]:
    """Some blocks of numbers much larger than others, and one that is zero."""
    generator = np.random.default_rng(seed)
    found = []
    for size in SIZES:
        wide = generator.standard_normal((count, size)) * np.exp(3 * generator.standard_normal((count, 1)))
        wide[:, :200] *= 100.0
        found.append(torch.from_numpy(wide.astype(np.float32)))
    found[1][0] = 0
    return found


@pytest.mark.parametrize("count", [1, 2, 9])
def test_products_are_those_of_the_gradients(count: int) -> None:
    model, kept, own = steered(), KeptGradients(1 << 20), gradients(70)
    rows = np.random.default_rng(1).permutation(500)[:70]
    kept.add(model, rows[:40], [part[:40] for part in own])
    kept.add(model, rows[40:], [part[40:] for part in own])
    queries = gradients(count, seed=2)
    asked = np.random.default_rng(3).permutation(70)[:50]
    found = kept.products(model, queries, rows[asked])
    wanted = np.array([(q.double() @ g[asked].double().T).numpy() for q, g in zip(queries, own, strict=True)])
    lengths = np.array(
        [np.outer(q.norm(dim=1), g[asked].norm(dim=1)) for q, g in zip(queries, own, strict=True)]
    )
    assert (np.abs(found - wanted) <= 2e-5 * lengths).all()
    needed = np.random.default_rng(4).random((count, 50)) < 0.5
    part = kept.products(model, queries, rows[asked], needed)
    np.testing.assert_array_equal(part, np.where(needed, found, 0.0))


def test_a_chunk_takes_half_of_its_gradients_bytes_and_the_oldest_leave() -> None:
    model, own = steered(), gradients(6)
    each = KeptGradients.bytes_of(model)
    assert each < 0.52 * 4 * sum(SIZES)
    kept = KeptGradients(4 * each)
    assert kept.room_for(model, 4) and not kept.room_for(model, 5)
    kept.add(model, np.arange(4), [part[:4] for part in own])
    assert kept.nbytes == 4 * each and not kept.room_for(model, 1)
    kept.products(model, gradients(1), np.array([0]))  # asked for just now
    kept.add(model, np.arange(4, 6), [part[4:] for part in own])
    assert kept.known(model, np.arange(6)).tolist() == [0, 3, 4, 5] and kept.nbytes == 4 * each
    assert kept.known(steered(), np.arange(6)).tolist() == []
    assert KeptGradients(each - 1).add(model, np.arange(1), own) is None


def test_what_is_not_finite_stays_so() -> None:
    model, kept, own = steered(), KeptGradients(1 << 20), gradients(3)
    own[0][1, 300] = torch.nan
    own[2][2, 5] = torch.inf
    kept.add(model, np.arange(3), own)
    found = kept.products(model, gradients(1), np.arange(3)).sum(axis=0)[0]
    assert np.isfinite(found).tolist() == [True, False, False]
