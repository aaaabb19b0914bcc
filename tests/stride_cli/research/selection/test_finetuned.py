"""Means and spreads of fine-tuned models' scores."""

from __future__ import annotations

import numpy as np
import pytest

from stride_cli.research.selection.finetuned import Score, score_record, spread


def test_spread_over_seeds_and_tasks() -> None:
    scores = [
        Score(np.array([1.0, 2.0, 3.0]), np.array([0.5, 0.0, np.nan])),
        Score(np.array([1.0, 2.0, 6.0]), np.array([1.0, 0.0, np.nan])),
    ]
    record = score_record("chosen", scores, ["a", "b", "b"])
    assert record["loss"] == {"mean": 2.5, "sd": pytest.approx(np.sqrt(0.5))}
    assert record["f1"]["mean"] == pytest.approx(0.375)  # a text has no answer
    assert [(group["task"], group["f1"]) for group in record["tasks"]] == [("a", 0.75), ("b", 0.0)]
    assert record["f1_over_tasks"]["sd"] == pytest.approx(np.std([0.75, 0.0], ddof=1))
    assert np.isnan(spread([1.0])["sd"])
