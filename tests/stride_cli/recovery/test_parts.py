"""What is computed of all chunks part by part: the same as at once, and in memory that does not grow."""

from __future__ import annotations

import tracemalloc

import numpy as np

from index_format.design import build_columns
from index_format.shards import ShardedArray
from stride_cli.recovery.lasso import solve_lasso
from stride_cli.recovery.problem import LassoSettings, Solution
from stride_cli.recovery.ranking import rank_documents
from stride_cli.recovery.screening import Design

K, DEGREE = 60, 4


def solved(n: int, *, seed: int = 0) -> tuple[np.ndarray, Solution]:
    random = np.random.default_rng(seed)
    columns = build_columns(0, n, n_subsets=K, degree=DEGREE, seed=0)
    y = random.normal(size=K)
    return columns, solve_lasso(columns, y, LassoSettings(lambda_ratio=0.2), n_subsets=K)


def test_sums_of_a_design_in_shards_are_those_of_the_whole() -> None:
    columns = build_columns(0, 300, n_subsets=K, degree=DEGREE, seed=0)
    weights = np.random.default_rng(1).normal(size=300)
    matrix = np.zeros((K, 300))
    matrix[columns.T, np.arange(300)] = 1.0
    pieces = Design(ShardedArray([columns[:90], columns[90:91], columns[91:]]), K)
    np.testing.assert_allclose(pieces.sums(weights), matrix @ weights, atol=1e-12)


def test_ranking_holds_little_of_many_chunks() -> None:
    """Of a million chunks every number for each would be 8 MB."""
    n = 1_000_000
    columns, found = solved(n)
    documents = ShardedArray([np.arange(n // 2), np.arange(n // 2, n)])
    rank_documents(found, columns, documents, top=5, seen=np.ones(7, np.uint8))  # compiled
    tracemalloc.start()
    try:
        up, _ = rank_documents(found, columns, documents, top=5, seen=np.ones(7, np.uint8))
        assert len(up) == 5
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 6e6


def test_chunks_beyond_what_the_fit_has_seen_are_new() -> None:
    columns, found = solved(40)
    up, _ = rank_documents(found, columns, np.arange(40), top=40, seen=np.ones(25, np.uint8))
    assert {hit.seen for hit in up if hit.chunk < 25} == {True}
    assert {hit.seen for hit in up if hit.chunk >= 25} == {False}
