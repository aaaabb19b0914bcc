"""Findings as CSV, SARIF and HTML: what an item or a document is called runs nowhere."""

from __future__ import annotations

import csv
import io
import json
from typing import Any

from stride_cli.audit.formats import to_csv, to_sarif
from stride_cli.audit.judge import LEAKED, Finding
from stride_cli.corpus.documents import Document
from stride_cli.report.audit_page import render_page

NASTY = '=cmd|"/c calc"!A1\x1b]0;owned\x07\u202e<script>'


def finding() -> Finding:
    lexical: Any = {
        "present": True,
        "near": False,
        "contained": 1.0,
        "contained_document": "=2",
        "ngram": 8,
        "ngram_share": 1.0,
        "longest_run": 9,
        "document": "@SUM(A1)",
        "chunk": 3,
        "passage": "-1 is negative",
        "bm25_document": "+1",
        "bm25_chunk": 3,
        "bm25_score": -0.5,
        "bm25_passage": "a = b",
    }
    effect: Any = {
        "loss": 1.0,
        "base_loss": None,
        "control_loss": 0.5,
        "loss_gap": -0.5,
        "candidate_share": 0.1,
    }
    controls: Any = {"kind": "file", "count": 30}
    return Finding(Document(NASTY, text="a b c", line=1), LEAKED, 0.01, 0.02, lexical, effect, controls)


def test_texts_are_no_formulas_and_numbers_stay_numbers() -> None:
    (row,) = csv.DictReader(io.StringIO(to_csv([finding()])))
    assert row["item"] == f"'{NASTY}"
    assert row["lexical.document"] == "'@SUM(A1)" and row["lexical.bm25_document"] == "'+1"
    assert row["lexical.passage"] == "'-1 is negative" and row["lexical.bm25_passage"] == "a = b"
    assert row["effect.loss_gap"] == "-0.5" and row["lexical.bm25_score"] == "-0.5"


def test_sarif_and_page_steer_nothing() -> None:
    sarif = to_sarif([finding()])
    page = render_page([finding()], benchmark=NASTY, index_name=NASTY, level=0.05)
    for text in (sarif, page):
        assert not set(text) & set("\x1b\x07\u202e")
    (result,) = json.loads(sarif)["runs"][0]["results"]
    assert result["properties"]["item"] == NASTY
    assert page.count("<script>") == 1  # its own
    assert r"\x1b]0;owned\x07\u202e" in page
