"""Stated recall: it holds as often as it says, whatever influences look like, and says much where it can."""

from __future__ import annotations

import numpy as np
import pytest

from stride_cli.attribution.direct import Exact
from stride_cli.attribution.estimates import Posteriors
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
    exact = Exact(known, influences[known], factor=1.0, offset=0.0)
    learnt = Posteriors.learnt(N, lambda start, stop: (estimates[start:stop], sizes[start:stop]), exact)
    strongest = np.sort(influences[known])[::-1]
    recall = stated_recall(strongest, learnt.expected_above(strongest[:TOP]), N)
    return recall.at_least, int(np.isin(np.argsort(-influences)[:TOP], known).sum())


@pytest.mark.parametrize("read", [14, 80, 200])
@pytest.mark.parametrize(("tail", "noise"), [(1.5, 1.0), (3.0, 0.3), (3.0, 3.0), (30.0, 1.0)])
def test_it_holds_as_often_as_it_says(tail: float, noise: float, read: int) -> None:
    random = np.random.default_rng([int(10 * tail), int(10 * noise), read])
    values, sizes = random.standard_t(tail, size=(80, N)), noise * random.gamma(4.0, 0.25, size=(80, N))
    stated, found = np.array([ask(random, *each, read) for each in zip(values, sizes, strict=True)]).T
    assert (found >= stated).mean() >= 0.95 - 2 * np.sqrt(0.95 * 0.05 / 80)
    if noise == 0.3 and read > 14:  # estimates are good: nearly all is found, and is said to be
        assert np.median(stated) >= 8


@pytest.mark.parametrize("alike", [True, False])
def test_it_holds_where_errors_are_of_very_different_sizes(alike: bool) -> None:
    """Lognormal ones: a few chunks are known hardly at all, whether their influences are as large or not."""
    random = np.random.default_rng(3)
    sizes = random.lognormal(0.0, 1.0, (100, N))
    values = random.standard_t(3.0, size=(100, N)) * (sizes if alike else 1.0)
    stated, found = np.array([ask(random, *each, 120) for each in zip(values, sizes, strict=True)]).T
    assert (found >= stated).mean() >= 0.95


def test_what_was_read_whole_was_found_whole() -> None:
    found = stated_recall(np.zeros(7), np.zeros(7), 7)
    assert (found.top, found.at_least, found.confidence) == (7, 7, 0.95)
    assert stated_recall(np.arange(20.0), np.linspace(0.0, 9.0, TOP), 1_000).at_least < TOP
    assert stated_recall(np.arange(20.0), np.zeros(TOP), 1_000).at_least == TOP
