"""The sweep on criteria that are known, and its store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stride_cli.research.tuning.search import DIMENSIONS, Trial, TrialStore, exceeds, sweep

START: dict[str, Any] = dict.fromkeys(DIMENSIONS) | {"space": "logit", "rank": 4, "damping": 1.0}
GRID = {"rank": [4, 8, 16], "damping": [0.1, 1.0, 10.0]}


def evaluate(settings: dict[str, Any]) -> Trial:
    """Best at rank 8 and damping 10, the same for all 20 queries but for a little that is the query's own."""
    mean = (
        0.5 - 0.01 * abs((settings["rank"] or 4) - 8) - 0.1 * abs(np.log10((settings["damping"] or 1) / 10))
    )
    own = np.random.default_rng(0).normal(size=20) * 0.1
    return Trial(dict(settings), mean + own, 1.0)


def test_finds_the_best_of_a_grid() -> None:
    found = list(sweep(GRID, START, evaluate))
    assert len(found) == 5
    best = [trial for trial, better in found if better][-1]
    assert (best.settings["rank"], best.settings["damping"]) == (8, 10.0)
    assert found[0][0].settings == START and found[0][1]
    assert [t.settings for t, _ in sweep(GRID, START, evaluate, limit=3)] == [
        t.settings for t, _ in found[:3]
    ]


def test_chance_is_no_reason_to_change() -> None:
    noise = np.random.default_rng(1)

    def random(settings: dict[str, Any]) -> Trial:
        return Trial(dict(settings), noise.normal(size=40), 0.0)

    first, worse = random(START), Trial(START, np.full(40, -9.0), 0.0)
    assert exceeds(first, worse) and not exceeds(worse, first)
    replaced = sum(exceeds(random(START), random(START)) for _ in range(400)) / 400
    assert 0.005 < replaced < 0.06  # beyond two standard errors: about one in forty
    one = Trial(START, np.array([0.2]), 0.0)
    assert exceeds(one, Trial(START, np.array([0.1]), 0.0)) and not exceeds(one, one)


def test_trials_are_kept_and_damaged_ones_are_not_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store, trial = TrialStore(tmp_path / "trials"), evaluate(START)
    assert store.read("a") is None
    store.add("a", trial)
    again = store.read("a")
    assert again is not None and again.kept and again.settings == trial.settings
    assert (again.scores == trial.scores).all()
    for content in ("{", "{}", store.path("a").read_text().replace('"a"', '"b"')):
        store.path("a").write_text(content)
        assert store.read("a") is None
    assert capsys.readouterr().err.count("is damaged") == 3
