"""Documents ranked from weights, on tables small enough to check by hand."""

from __future__ import annotations

import numpy as np
import pytest

from stride_cli.errors import UsageError
from stride_cli.recovery.lasso import Solution, solve_lasso
from stride_cli.recovery.problem import LassoSettings
from stride_cli.recovery.ranking import mid_ranks, rank_documents
from stride_cli.recovery.screening import Design


def solution(weights: dict[int, float], n: int, residual: np.ndarray) -> Solution:
    return Solution(
        indices=np.array(sorted(weights), dtype=np.int64),
        values=np.array([weights[i] for i in sorted(weights)], dtype=np.float64),
        intercept=0.0, lambda_=1.0, lambda_max=2.0, lambda_ratio=0.5, duality_gap=0.0, relative_gap=0.0,
        n_passes=2, n_epochs=3, r_squared=0.5, residual=residual, n_chunks=n,
    )  # fmt: skip


# 8 chunks of 5 documents, in 6 subsets of which each chunk is in 3
COLUMNS = np.array(
    [[0, 1, 2], [0, 1, 3], [3, 4, 5], [0, 2, 4], [1, 2, 3], [0, 1, 2], [2, 4, 5], [1, 3, 5]], dtype=np.uint16
)
DOCUMENT = np.array([0, 0, 1, 2, 2, 2, 3, 4])
ZERO = np.zeros(6)


def test_documents_sum_their_chunks():
    found = solution({0: 1.0, 1: 2.0, 2: 0.5, 3: 4.0, 4: -1.0, 5: -6.0, 6: -2.0}, 8, ZERO)
    up, down = rank_documents(found, COLUMNS, DOCUMENT, top=10, bottom=10)
    assert [(h.rank, h.document, h.influence, h.chunk) for h in up] == [(1, 0, 3.0, 1), (2, 1, 0.5, 2)]
    # document 2 sums 4 − 1 − 6; its best chunk is the one with the largest weight of that sign
    assert [(h.rank, h.document, h.influence, h.chunk) for h in down] == [(1, 2, -3.0, 5), (2, 3, -2.0, 6)]
    assert {h.sign for h in up} == {"supports"} and {h.sign for h in down} == {"opposes"}
    assert [h.share for h in up + down] == pytest.approx([3 / 16.5, 0.5 / 16.5, 3 / 16.5, 2 / 16.5])
    assert not any(h.backfilled for h in up + down) and all(h.seen for h in up + down)


def test_equal_influences_share_their_rank_even_across_the_cut():
    found = solution({0: 2.0, 2: 1.0, 3: 1.0, 6: 1.0, 7: 0.5}, 8, ZERO)
    up, _ = rank_documents(found, COLUMNS, DOCUMENT, top=3)
    assert [(h.rank, h.document) for h in up] == [(1, 0), (3, 1), (3, 2)]


def test_a_document_whose_chunks_cancel_is_no_evidence():
    found = solution({0: 1.0, 1: -1.0, 2: 0.3}, 8, ZERO)
    up, down = rank_documents(found, COLUMNS, DOCUMENT, top=9, bottom=9)
    assert [h.document for h in up] == [1] and down == []


def test_backfill_by_correlation_with_the_residual():
    residual = np.array([1.0, 2.0, -1.0, 0.5, -0.5, 0.25])
    # m·r:  2, 3.5, 0.25, −0.5, 1.5, 2, −1.25, 2.75; documents 0: 3.5, 1: .25, 2: 2, 3: −1.25, 4: 2.75
    found = solution({3: -1.0, 2: 5.0}, 8, residual)
    up, _ = rank_documents(found, COLUMNS, DOCUMENT, top=4)
    assert [(h.rank, h.document, h.chunk, h.backfilled) for h in up] == [
        (1, 1, 2, False),
        (2, 0, 1, True),
        (3, 4, 7, True),
    ]  # 2 opposes, 3 correlates negatively: neither is evidence
    assert [h.influence for h in up] == [5.0, 0.0, 0.0] and [h.share for h in up][1:] == [0.0, 0.0]
    assert all(h.sign == "supports" for h in up)
    assert [h.document for h in rank_documents(found, COLUMNS, DOCUMENT, top=2)[0]] == [1, 0]


def test_backfill_ranks_ties_in_the_middle_and_invents_nothing():
    tied = solution({}, 8, np.array([1.0, 1.0, 1.0, 0.0, 0.0, 0.0]))
    up, _ = rank_documents(tied, COLUMNS, DOCUMENT, top=2)
    # best chunks: documents 0 and 2 three subsets, then 1: none, 3: one, 4: one
    assert [(h.rank, h.document, h.chunk) for h in up] == [(1.5, 0, 0), (1.5, 2, 5)]
    third = rank_documents(tied, COLUMNS, DOCUMENT, top=3)[0][2]
    assert (third.rank, third.document) == (3.5, 3)
    assert rank_documents(solution({}, 8, ZERO), COLUMNS, DOCUMENT, top=5) == ([], [])


def test_backfill_over_many_chunks_equals_a_full_sort(rng):
    n, n_subsets = 60_000, 50
    columns = np.sort(rng.random((n, n_subsets)).argsort(axis=1)[:, :4], axis=1).astype(np.uint16)
    documents = np.sort(rng.integers(0, 3_000, n))
    residual = rng.normal(size=n_subsets)
    found = solution({5: 1.0, 50_000: -1.0}, n, residual)
    up, _ = rank_documents(found, [columns[:1000], columns[1000:]], documents, top=40)
    products = residual[columns].sum(axis=1)
    best = np.full(documents.max() + 1, -np.inf)
    np.maximum.at(best, documents, products)
    best[documents[[5, 50_000]]] = -np.inf
    assert [h.document for h in up[1:]] == np.argsort(-best, kind="stable")[:39].tolist()
    for hit in up[1:]:
        assert documents[hit.chunk] == hit.document
        assert products[hit.chunk] == pytest.approx(best[hit.document])


def test_all_chunks_of_one_document():
    """The search for more documents ends when there are none."""
    columns = np.tile(np.array([[0, 1, 2]], np.uint16), (50_000, 1))
    up, _ = rank_documents(solution({}, 50_000, np.ones(6)), columns, np.zeros(50_000, int), top=5)
    assert [(h.rank, h.document, h.chunk, h.neighbours) for h in up] == [(1, 0, 0, 49_999)]


def test_seen_and_neighbours_belong_to_the_chunk_shown():
    found = solution({0: 1.0, 6: -1.0}, 8, ZERO)
    up, down = rank_documents(
        found, COLUMNS, DOCUMENT, top=1, bottom=1, seen=np.array([0, 1, 1, 1, 1, 1, 1, 1], np.uint8)
    )
    assert (up[0].seen, up[0].neighbours) == (False, 4)  # chunks 1, 3, 4 share two subsets, 5 all three
    assert (down[0].seen, down[0].neighbours) == (True, 2)  # chunk 6, [2 4 5]: chunks 2 and 3


def test_neighbours_equal_set_intersections(rng):
    columns = np.sort(rng.random((400, 9)).argsort(axis=1)[:, :4], axis=1).astype(np.uint16)
    sets = [set(row) for row in columns.tolist()]
    expected = [sum(len(a & b) >= 3 for b in sets) - 1 for a in sets]
    assert Design(columns, 9).count_neighbours(np.arange(400)).tolist() == expected
    assert Design([columns[:7], columns[7:].copy()], 9).count_neighbours(np.array([3, 399])).tolist() == [
        expected[3],
        expected[399],
    ]
    assert Design(columns.astype(np.uint32), 9).count_neighbours(np.array([], int)).tolist() == []


def test_neighbours_with_one_subset_each_share_that_subset():
    columns = np.array([[0], [1], [0], [0], [2]], dtype=np.uint16)
    assert Design(columns, 3).count_neighbours(np.array([0, 1, 4])).tolist() == [2, 0, 0]


def test_mid_ranks():
    assert mid_ranks(np.array([5.0, 3.0, 3.0, 3.0, 1.0])).tolist() == [1, 3, 3, 3, 5]
    assert mid_ranks(np.array([])).tolist() == []


def test_planted_document_is_first(rng):
    n, n_subsets = 5_000, 200
    columns = np.sort(rng.random((n, n_subsets)).argsort(axis=1)[:, :8], axis=1).astype(np.uint16)
    y = 0.05 * rng.normal(size=n_subsets)
    y[columns[40]] += 1.0
    y[columns[41]] += 1.0
    y[columns[4_000]] -= 1.5
    found = solve_lasso(columns, y, LassoSettings(lambda_ratio=0.3), n_subsets=n_subsets)
    up, down = rank_documents(found, columns, np.arange(n) // 2, top=3, bottom=1)
    assert up[0].document == 20 and down[0].document == 2_000


@pytest.mark.parametrize(
    ("change", "message"),
    [({"chunk_document": DOCUMENT[:3]}, "3 entries for 8 chunks"), ({"top": -1}, "top is -1")],
)
def test_arguments_that_cannot_work(change, message):
    arguments = {"columns": COLUMNS, "chunk_document": DOCUMENT, "top": 1} | change
    with pytest.raises(UsageError, match=message):
        rank_documents(solution({}, 8, ZERO), **arguments)
