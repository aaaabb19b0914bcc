"""What is computed of all chunks part by part: the same as at once, and in memory that does not grow."""

from __future__ import annotations

import tracemalloc
from unittest.mock import patch

import numpy as np
import pytest

from index_format.design import build_columns
from index_format.shards import ShardedArray
from stride_cli.recovery import refinement
from stride_cli.recovery.problem import LassoSettings, Solution
from stride_cli.recovery.ranking import rank_documents
from stride_cli.recovery.refinement import candidates, debiased, trust, with_weights
from stride_cli.recovery.several import solve_models

K, DEGREE = 60, 4


def solved(n: int, *, models: int = 2, seed: int = 0) -> tuple[list[np.ndarray], Solution]:
    random = np.random.default_rng(seed)
    designs = [build_columns(0, n, n_subsets=K, degree=DEGREE, seed=each) for each in range(models)]
    y = random.normal(size=(1, models * K))
    return designs, solve_models(designs, y, LassoSettings(lambda_ratio=0.2), n_subsets=K)[0]


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("rows", [7, 100, 1 << 18])
def test_candidates_do_not_depend_on_the_parts(rows: int, alone: bool) -> None:
    designs, found = solved(500)
    random = np.random.default_rng(1)
    second, third = random.normal(size=500), random.normal(size=500) if alone else None
    expected = candidates(designs, found, 41, second, third)
    with patch.object(refinement, "_ROWS", rows):
        chosen = candidates(designs, found, 41, second, third)
        assert trust(designs, found) == pytest.approx(chosen.others, rel=1e-12)
    np.testing.assert_array_equal(chosen.chunks, expected.chunks)
    np.testing.assert_allclose(chosen.margins, expected.margins, atol=1e-12)
    # chosen by hand, of everything at once
    estimate, noise = debiased(designs, found)
    guides = [*([third] if alone else []), estimate / noise + second]
    left, margins = np.ones(500, bool), []
    for number, guide in enumerate(guides):
        strength = np.where(guide > 0, guide, -0.3 * guide)
        strength[~left] = -np.inf
        share = 41 * (number + 1) // len(guides) - 41 * number // len(guides)
        order = np.argsort(-strength, kind="stable")
        left[order[:share]] = False
        margins.append((guide, strength[order[share]]))
    np.testing.assert_array_equal(chosen.chunks, np.flatnonzero(~left))
    wanted = [guide[chosen.chunks] - cut for guide, cut in margins]
    np.testing.assert_allclose(chosen.margins, wanted, atol=1e-9)
    assert chosen.others == pytest.approx(max(0.0, 1 - noise**2 / estimate.var()))


def test_parts_of_a_design_in_shards_are_parts_of_the_whole() -> None:
    designs, found = solved(300, models=1)
    whole, _ = debiased(designs, found)
    pieces = ShardedArray([designs[0][:90], designs[0][90:91], designs[0][91:]])
    estimate = refinement.Debiased([pieces], found)
    for start, stop in ((0, 300), (0, 90), (80, 95), (91, 91), (200, 300)):
        np.testing.assert_array_equal(estimate[start:stop], whole[start:stop])
    some = np.array([0, 3, 89, 90, 91, 299])
    np.testing.assert_allclose(estimate[some], whole[some], rtol=1e-12)


def test_choosing_ranking_and_reading_hold_little_of_many_chunks() -> None:
    """Of a million chunks every number for each would be 8 MB."""
    n = 1_000_000
    designs, found = solved(n, models=1)
    documents = ShardedArray([np.arange(n // 2), np.arange(n // 2, n)])

    class Guide:
        def __getitem__(self, rows):
            return np.zeros(rows.stop - rows.start if isinstance(rows, slice) else len(rows))

    second = Guide()
    candidates(designs, found, 50, second)  # compiled
    rank_documents(found, designs[0], documents, top=5, seen=np.ones(7, np.uint8))
    tracemalloc.start()
    try:
        with patch.object(refinement, "_ROWS", 1 << 14):
            chosen = candidates(designs, found, 50, second)
        read = with_weights(found, chosen.chunks, np.ones(50))
        up, _ = rank_documents(read, designs[0], documents, top=5, seen=np.ones(7, np.uint8))
        assert len(read.indices) >= 50 and len(up) == 5
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 6e6


def test_chunks_beyond_what_the_fit_has_seen_are_new() -> None:
    designs, found = solved(40, models=1)
    up, _ = rank_documents(found, designs[0], np.arange(40), top=40, seen=np.ones(25, np.uint8))
    assert {hit.seen for hit in up if hit.chunk < 25} == {True}
    assert {hit.seen for hit in up if hit.chunk >= 25} == {False}
