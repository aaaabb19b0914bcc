"""Orders of documents against the definitions, and what ties and zeros do."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import rankdata

from stride_cli.research.selection.aggregation import choose, collect

SCORES = st.integers(1, 12).flatmap(
    lambda n: st.lists(st.lists(st.integers(-2, 3), min_size=n, max_size=n), min_size=1, max_size=5)
)


@settings(deadline=None, max_examples=80)
@given(scores=SCORES, data=st.data())
def test_greedy_is_the_best_rank_over_queries(scores: list[list[int]], data) -> None:
    matrix = np.array(scores, float)
    size = data.draw(st.integers(1, matrix.shape[1]))
    ranks = np.where(matrix > 0, rankdata(-matrix, axis=1), np.inf)
    best = ranks.min(axis=0)
    chosen = choose(collect(matrix, matrix.shape[1]), size, "greedy")
    assert len({choice.document for choice in chosen}) == size
    found = np.array([best[choice.document] for choice in chosen])
    np.testing.assert_array_equal(found, np.sort(best)[:size])  # the smallest r_j, in order
    for choice in chosen:
        if np.isfinite(best[choice.document]):
            assert choice.rank == best[choice.document] == ranks[choice.query, choice.document]
            assert choice.score == matrix[choice.query, choice.document] > 0
        else:
            assert np.isnan(choice.rank) and choice.query == -1


@settings(deadline=None, max_examples=50)
@given(scores=SCORES)
def test_sum_is_by_the_summed_score(scores: list[list[int]]) -> None:
    matrix = np.array(scores, float)
    chosen = choose(collect(matrix, matrix.shape[1]), matrix.shape[1], "sum")
    totals = [matrix.sum(axis=0)[choice.document] for choice in chosen]
    assert totals == sorted(totals, reverse=True)
    assert all(choice.score == total for choice, total in zip(chosen, totals, strict=True))


def test_quotas_take_turns() -> None:
    matrix = np.array([[9, 8, 7, 6, 0, 0], [9, 8, 7, 6, 5, 0], [0, 0, 0, 0, 2, 9.0]])
    tasks = ["many", "many", "one"]
    chosen = choose(collect(matrix, 6, tasks), 4, "quota")
    assert [choice.document for choice in chosen] == [0, 5, 1, 4]
    assert [choice.query for choice in chosen] == [0, 2, 0, 2]
    alone = choose(collect(matrix, 6), 4, "greedy")
    assert [choice.document for choice in alone] == [0, 5, 1, 4]  # here each query's best come first too


def test_zeros_are_drawn_by_lot() -> None:
    matrix = np.zeros((2, 50))
    matrix[0, 3] = 1.0
    chosen = choose(collect(matrix, 50), 10, "greedy", seed=1)
    assert chosen[0].document == 3 and chosen[0].rank == 1
    assert [choice.document for choice in chosen[1:]] != list(range(9))
    assert all(np.isnan(choice.rank) for choice in chosen[1:])
    other = choose(collect(matrix, 50), 10, "greedy", seed=2)
    assert {choice.document for choice in other} != {choice.document for choice in chosen}
