"""Stated recall: it holds as often as it says, whatever influences look like, and says much where it can."""

from __future__ import annotations

import numpy as np
import pytest

from stride_cli.recovery.posterior import Posterior
from stride_cli.recovery.recall import TOP, stated_recall

N = 2_000


def ask(random: np.random.Generator, influences: np.ndarray, sizes: np.ndarray, read: int) -> tuple[int, int]:
    """Estimate influences with errors of known sizes, of which half of what is read is chosen by something
    that may mislead: what is stated, and what is so."""
    estimates = influences + sizes * random.normal(size=N)
    misleading = estimates + 0.3 * influences + random.normal(size=N) * influences.std()
    left = np.ones(N, bool)
    for strength in (estimates, misleading):
        left[np.argsort(-np.where(left, strength, -np.inf))[: read // 2]] = False
    known = np.flatnonzero(~left)
    learnt, others = Posterior.learnt(estimates / sizes), np.flatnonzero(left)
    above = np.array(
        [
            learnt.above(estimates[others] / sizes[others], strong / sizes[others]).sum()
            for strong in np.sort(influences[known])[::-1][:TOP]
        ]
    )
    recall = stated_recall(influences[known], above, N)
    return recall.at_least, int(np.isin(np.argsort(-influences)[:TOP], known).sum())


@pytest.mark.parametrize("read", [14, 80, 200])
@pytest.mark.parametrize(("tail", "noise"), [(1.5, 1.0), (3.0, 0.3), (3.0, 3.0), (30.0, 1.0)])
def test_it_holds_as_often_as_it_says(tail: float, noise: float, read: int) -> None:
    random = np.random.default_rng([int(10 * tail), int(10 * noise), read])

    def one() -> tuple[int, int]:
        return ask(random, random.standard_t(tail, size=N), noise * random.gamma(4.0, 0.25, size=N), read)

    stated, found = np.array([one() for _ in range(80)]).T
    assert (found >= stated).mean() >= 0.95 - 2 * np.sqrt(0.95 * 0.05 / 80)
    if noise == 0.3 and read > 14:  # estimates are good: nearly all is found, and is said to be
        assert np.median(stated) >= 8


def test_it_holds_where_errors_are_of_very_different_sizes() -> None:
    """Lognormal ones: a few chunks are known hardly at all, and their influences are as large as that."""
    random = np.random.default_rng(3)
    held = []
    for _ in range(100):
        sizes = random.lognormal(0.0, 1.0, N)
        stated, found = ask(random, sizes * random.standard_t(3.0, size=N), sizes, 120)
        held.append(found >= stated)
    assert np.mean(held) >= 0.95 - 2 * np.sqrt(0.95 * 0.05 / 100)


def test_what_was_read_whole_was_found_whole() -> None:
    found = stated_recall(np.zeros(7), np.zeros(7), 7)
    assert (found.top, found.at_least, found.confidence) == (7, 7, 0.95)
    assert stated_recall(np.arange(20.0), np.linspace(0.0, 9.0, TOP), 1_000).at_least < TOP
    assert stated_recall(np.arange(20.0), np.zeros(TOP), 1_000).at_least == TOP
