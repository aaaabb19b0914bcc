"""Answers made by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from stride_cli.report.contents import ShownAnswer, from_record


def make_hit(rank: float, document: str, share: float, **changes: Any) -> dict[str, Any]:
    """A hit's record; a negative share opposes."""
    hit = {
        "rank": rank,
        "document": document,
        "influence": 2.0 * share,
        "share": abs(share),
        "sign": "supports" if share >= 0 else "opposes",
        "chunk": 17,
        "passage": "Paris is the capital of France. <script>alert(1)</script>",
        "seen": True,
        "neighbours": 0,
        "backfilled": share == 0,
    }
    return hit | changes


def make_record(shares: list[float] | None = None, **changes: Any) -> dict[str, Any]:
    """An answer's record with documents d0, d1, … of these shares; dotted keys change nested values."""
    shares = [0.4, 0.05, -0.03] if shares is None else shares
    hits = [make_hit(place + 1, f"d{place}", share) for place, share in enumerate(shares)]
    record: dict[str, Any] = {
        "schema": "stride.answer/1",
        "prompt": "The capital of France is",
        "response": " Paris & <b>nothing</b> else",
        "generated": True,
        "scored_tokens": 5,
        "loss": 0.25,
        "hits": [hit for hit in hits if hit["sign"] == "supports"],
        "opposers": [hit for hit in hits if hit["sign"] == "opposes"],
        "recovery": {
            "lambda": 0.01,
            "lambda_ratio": 0.03,
            "nonzeros": 60,
            "duality_gap": 1e-9,
            "relative_gap": 1e-7,
            "r_squared": 0.93,
            "passes": 2,
        },
        "measurement": {"method": "linear", "subsets": 400, "coverage": 1.0},
        "seconds": {"generate": 0.1, "measure": 0.1, "recover": 0.1, "rank": 0.1},
    }
    for key, value in changes.items():
        group, _, name = key.rpartition("__")
        (record[group] if group else record)[name] = value
    return record


def make_shown(**changes: Any) -> ShownAnswer:
    """An answer with everything that a live one has."""
    from dataclasses import replace

    shown = from_record(make_record(**changes))
    generator = np.random.default_rng(0)
    measured = generator.normal(size=50) * 1e-3
    long = "One. Two. " * 60 + "Paris is the capital of France. " + "Three. Four. " * 60
    at = long.index("Paris")
    first = replace(shown.supporters[0], text=long, span=(at, at + 31), held=0.62, whole=True)
    return replace(
        shown,
        pieces=((" Paris", True), (" & <b>", True), ("nothing</b> else", False)),
        supporters=(first, *shown.supporters[1:]),
        responses=(measured, 0.9 * measured),
    )


@pytest.fixture(scope="session")
def record() -> Callable[..., dict[str, Any]]:
    return make_record


@pytest.fixture(scope="session")
def shown() -> Callable[..., ShownAnswer]:
    return make_shown
