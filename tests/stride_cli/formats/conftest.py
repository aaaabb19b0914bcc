"""Records made by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.stride_cli.report.conftest import make_record


def make_audit(**changes: Any) -> dict[str, Any]:
    """An audited item's record."""
    lexical = {
        "present": True, "near": False, "contained": 1.0, "contained_document": "d1", "ngram": 8,
        "ngram_share": 1.0, "longest_run": 20, "document": "d1", "chunk": 3,
        "passage": "=1+1", "bm25_document": "d1", "bm25_chunk": 3, "bm25_score": 9.5, "bm25_passage": "p",
    }  # fmt: skip
    effect = {
        "p_loss": 0.01, "p_influence": 0.02, "loss": 0.5, "base_loss": None, "control_loss": 2,
        "loss_gap": 1.5, "candidates": 4,
        "candidate_influence": 0.3, "candidate_share": 0.1, "copied_share": 0.1, "strongest_document": "d1",
        "strongest_chunk": None, "strongest_influence": 0.2, "strongest_share": 0.1,
        "strongest_is_candidate": True,
    }  # fmt: skip
    controls = {"kind": "made", "count": 40}
    record = {
        "schema": "stride.audit/1",
        "item": "i1",
        "line": 1,
        "verdict": "no evidence",
        "p": 0.2,
        "q": 0.4,
    }
    return record | {"lexical": lexical, "effect": effect, "controls": controls} | changes


@pytest.fixture(scope="session")
def record() -> Callable[..., dict[str, Any]]:
    return make_record


@pytest.fixture(scope="session")
def audited() -> Callable[..., dict[str, Any]]:
    return make_audit
