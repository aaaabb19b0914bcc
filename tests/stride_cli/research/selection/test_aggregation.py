"""Orders of documents against the definitions, and what ties and zeros do."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import rankdata

from stride_cli.research.selection.aggregation import choose

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
    chosen = choose(matrix, matrix.shape[1], size)
    assert len({choice.document for choice in chosen}) == size
    found = np.array([best[choice.document] for choice in chosen])
    np.testing.assert_array_equal(found, np.sort(best)[:size])  # the smallest r_j, in order
    for choice in chosen:
        if np.isfinite(best[choice.document]):
            assert choice.rank == best[choice.document] == ranks[choice.query, choice.document]
            assert choice.score == matrix[choice.query, choice.document] > 0
        else:
            assert np.isnan(choice.rank) and choice.query == -1


def test_zeros_are_drawn_by_lot() -> None:
    matrix = np.zeros((2, 50))
    matrix[0, 3] = 1.0
    chosen = choose(matrix, 50, 10, seed=1)
    assert chosen[0].document == 3 and chosen[0].rank == 1
    assert [choice.document for choice in chosen[1:]] != list(range(9))
    assert all(np.isnan(choice.rank) for choice in chosen[1:])
    other = choose(matrix, 50, 10, seed=2)
    assert {choice.document for choice in other} != {choice.document for choice in chosen}
