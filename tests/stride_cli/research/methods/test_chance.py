"""Chance: standard normal, from the seed and the query alone."""

from __future__ import annotations

import numpy as np

from stride_cli.research.methods.chance import Chance
from tests.stride_cli.research.methods.gradients.scored import score_all


def scores(task, queries) -> np.ndarray:
    method = Chance()
    method.fit(task)
    return score_all(method, queries)


def test_moments_and_streams(make_task, make_queries, sentences) -> None:
    queries = make_queries(sentences)
    drawn = scores(make_task(sentences * 20), queries)
    assert abs(drawn.mean()) < 0.02 and abs(drawn.std() - 1) < 0.02
    assert abs(np.corrcoef(drawn[0], drawn[1])[0, 1]) < 0.15
    task = make_task(sentences)
    assert not np.array_equal(scores(task, queries), scores(make_task(sentences, seed=4), queries))
