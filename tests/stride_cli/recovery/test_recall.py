"""Stated recall: it holds as often as it says, whatever influences look like, and says much where it can."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import ndtr

from stride_cli.recovery.posterior import Posterior
from stride_cli.recovery.recall import stated_recall

N, READ = 2_000, 80


def ask(
    random: np.random.Generator, tail: float, noise: float, read: int = READ, *, expected: bool = False
) -> tuple[int, int]:
    """One query of influences with such a tail, estimated with such an error: what is stated, what is so.

    Half of what is read is chosen by these estimates, half by them and others that may mislead. `expected`:
    the statement also knows how many of the others are to be expected above.
    """
    influences = random.standard_t(tail, size=N)
    sizes = noise * random.gamma(4.0, 0.25, size=N)  # of the errors, known
    estimates = influences + sizes * random.normal(size=N)
    misleading = 0.3 * influences + random.normal(size=N)
    left, odds = np.ones(N, bool), np.zeros(N)
    for strength in (estimates, estimates + misleading):
        order = np.argsort(-np.where(left, strength, -np.inf))
        left[order[: read // 2]] = False
        spare = strength - strength[order[read // 2]] + influences - estimates
        odds = np.maximum(odds, ndtr(spare / sizes))
    known, above = np.flatnonzero(~left), None
    if expected:
        learnt = Posterior.learnt(estimates / sizes)
        others = np.argsort(-np.where(left, estimates + 3.0 * sizes, -np.inf))[:200]
        chances = [
            learnt.above(estimates[others] / sizes[others], strong / sizes[others]).sum()
            for strong in np.sort(influences[known])[::-1][:10]
        ]
        above = np.array(chances)
    recall = stated_recall(influences[known], odds[known], N, above)
    return recall.at_least, int(np.isin(np.argsort(-influences)[:10], known).sum())


@pytest.mark.parametrize("tail", [1.5, 3.0, 30.0])
@pytest.mark.parametrize("noise", [0.3, 1.0, 3.0])
def test_it_holds_as_often_as_it_says(tail: float, noise: float) -> None:
    random = np.random.default_rng([int(10 * tail), int(10 * noise)])
    stated, found = np.array([ask(random, tail, noise) for _ in range(400)]).T
    assert (found >= stated).mean() >= 0.95 - 2 * np.sqrt(0.95 * 0.05 / 400)
    if noise == 0.3 and tail < 30:  # estimates are good: nearly all is found, and is said to be
        assert np.median(stated) >= 9


@pytest.mark.parametrize(("tail", "noise"), [(3.0, 0.3), (1.5, 1.0)])
def test_it_holds_where_hardly_more_is_read_than_is_asked_for(tail: float, noise: float) -> None:
    """Strong ones that each were unlikely to be read have none of their like among what was."""
    statements = {}
    for expected in (False, True):
        random = np.random.default_rng([int(10 * tail), 7])
        asked = [ask(random, tail, noise, 14, expected=expected) for _ in range(60)]
        statements[expected] = np.array(asked).T
    stated, found = statements[True]
    assert (found >= stated).mean() >= 0.95 - 2 * np.sqrt(0.95 * 0.05 / 60)
    assert (stated <= statements[False][0]).all() and np.median(stated) >= 2


@given(st.integers(1, 40), st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_more_certain_chunks_never_state_less(count: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    influences, odds = random.normal(size=count), random.random(count)
    lower = stated_recall(influences, odds, 1_000)
    higher = stated_recall(influences, odds + (1 - odds) * random.random(count), 1_000)
    assert 0 <= lower.at_least <= higher.at_least <= 10
    certain = stated_recall(influences, np.ones(count), 1_000)
    assert certain.at_least == min(10, count)


def test_others_are_counted_where_few_are_read() -> None:
    above = np.linspace(0.0, 9.0, 10)
    few, many = (stated_recall(np.arange(float(n)), np.ones(n), 1_000, above) for n in (99, 100))
    assert few.at_least < many.at_least == 10


def test_what_was_read_whole_was_found_whole() -> None:
    found = stated_recall(np.zeros(7), np.zeros(7), 7)
    assert (found.top, found.at_least, found.confidence) == (7, 7, 0.95)
    assert stated_recall(np.arange(7.0), np.zeros(7), 8).at_least == 0
