"""What is computed of all chunks part by part: the same as at once, and in memory that does not grow."""

from __future__ import annotations

import tracemalloc
from unittest.mock import patch

import numpy as np
import pytest

from index_format.design import build_columns
from index_format.shards import ShardedArray
from stride_cli.recovery import candidates as module
from stride_cli.recovery.candidates import Debiased, candidates, with_weights
from stride_cli.recovery.lasso import solve_lasso
from stride_cli.recovery.problem import LassoSettings, Solution
from stride_cli.recovery.ranking import rank_documents

K, DEGREE = 60, 4


def solved(n: int, *, seed: int = 0) -> tuple[np.ndarray, Solution]:
    random = np.random.default_rng(seed)
    columns = build_columns(0, n, n_subsets=K, degree=DEGREE, seed=0)
    y = random.normal(size=K)
    return columns, solve_lasso(columns, y, LassoSettings(lambda_ratio=0.2), n_subsets=K)


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("rows", [7, 100, 1 << 18])
def test_candidates_do_not_depend_on_the_parts(rows: int, alone: bool) -> None:
    columns, found = solved(500)
    random = np.random.default_rng(1)
    second, third = random.normal(size=500), random.normal(size=500) if alone else None
    guided = second.__getitem__, None if third is None else third.__getitem__
    expected = candidates(columns, found, 41, *guided)
    with patch.object(module, "_ROWS", rows):
        chosen = candidates(columns, found, 41, *guided)
    assert chosen.others == pytest.approx(expected.others, rel=1e-12)
    np.testing.assert_array_equal(chosen.chunks, expected.chunks)
    np.testing.assert_allclose(chosen.margins, expected.margins, atol=1e-12)
    # chosen by hand, of everything at once
    debiased = Debiased(columns, found)
    estimate, noise = debiased(slice(0, 500)), debiased.noise
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
    columns, found = solved(300)
    whole = Debiased(columns, found)(slice(0, 300))
    estimate = Debiased(ShardedArray([columns[:90], columns[90:91], columns[91:]]), found)
    for start, stop in ((0, 300), (0, 90), (80, 95), (91, 91), (200, 300)):
        np.testing.assert_array_equal(estimate(slice(start, stop)), whole[start:stop])
    some = np.array([0, 3, 89, 90, 91, 299])
    np.testing.assert_allclose(estimate(some), whole[some], rtol=1e-12)


def test_choosing_ranking_and_reading_hold_little_of_many_chunks() -> None:
    """Of a million chunks every number for each would be 8 MB."""
    n = 1_000_000
    columns, found = solved(n)
    documents = ShardedArray([np.arange(n // 2), np.arange(n // 2, n)])

    def second(rows: slice | np.ndarray) -> np.ndarray:
        return np.zeros(rows.stop - rows.start if isinstance(rows, slice) else len(rows))

    candidates(columns, found, 50, second)  # compiled
    rank_documents(found, columns, documents, top=5, seen=np.ones(7, np.uint8))
    tracemalloc.start()
    try:
        with patch.object(module, "_ROWS", 1 << 14):
            chosen = candidates(columns, found, 50, second)
        read = with_weights(found, chosen.chunks, np.ones(50))
        up, _ = rank_documents(read, columns, documents, top=5, seen=np.ones(7, np.uint8))
        assert len(read.indices) >= 50 and len(up) == 5
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 6e6


def test_chunks_beyond_what_the_fit_has_seen_are_new() -> None:
    columns, found = solved(40)
    up, _ = rank_documents(found, columns, np.arange(40), top=40, seen=np.ones(25, np.uint8))
    assert {hit.seen for hit in up if hit.chunk < 25} == {True}
    assert {hit.seen for hit in up if hit.chunk >= 25} == {False}
