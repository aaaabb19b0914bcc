"""Findings as CSV, SARIF and HTML: what an item or a document is called runs nowhere."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from typing import Any

from stride_cli.audit.formats import sentence, to_csv, to_sarif
from stride_cli.audit.judge import LEAKED, NOTHING, Finding
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


def test_the_page_says_first_how_many_leaked_and_can_be_filtered() -> None:
    findings = [
        replace(finding(), document=Document(f"item {number}", text="a", line=1)) for number in range(9)
    ]
    findings = [*findings[:4], *(replace(each, verdict=NOTHING) for each in findings[4:])]
    page = render_page(findings, benchmark="b", index_name="i", level=0.05)
    body = page.partition("<body>")[2]
    assert body.index("4 of 9 leaked") < body.index("Of the others") < body.index("<details")
    assert "<title>4 of 9 leaked: " in page
    assert body.count('data-verdict="0">') == 4 and body.count('data-verdict="3">') == 5
    assert body.count('<span class="verdict v3">no evidence</span>') == 5  # a column of its own
    assert 'id="filter"' in body and '<option value="3">no evidence</option>' in body
    # a row shows that it opens; the script is the page's own, and no other runs
    assert 'summary::before { content: "\\25b8"' in page and "[open] > summary::before" in page
    assert "script-src 'sha256-" in page and "default-src 'none'" in page and "http" not in body


def test_a_sentence_says_what_is_there_in_other_words_and_what_fine_tuning_took() -> None:
    plain = finding()
    assert "other words" not in sentence(plain) and "before the fine-tuning" not in sentence(plain)
    lexical: Any = {**plain.lexical, "present": False, "near": True, "contained": 0.42}
    effect: Any = {**plain.effect, "base_loss": 2.5}
    near = sentence(replace(plain, lexical=lexical, effect=effect))
    assert "In other words it is there, as in document '=2': one chunk holds 42% of its 3-grams." in near
    assert "Loss 1.000 nats a token (2.500 before the fine-tuning), controls 0.500" in near
