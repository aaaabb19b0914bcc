"""Findings as CSV, SARIF and HTML: what an item or a document is called runs nowhere."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from stride_cli.audit.formats import summary, to_csv, to_sarif
from stride_cli.audit.judge import LEAKED, NOTHING, PRESENT, UNDECIDED, Finding
from stride_cli.characters import printable
from stride_cli.corpus.documents import Document
from stride_cli.report.audit_page import _MARKS, render_page

NASTY = '=cmd|"/c calc"!A1\x1b]0;owned\x07\u202e<script>'


def finding(verdict: str = LEAKED, **changed: Any) -> Finding:
    presence: Any = {"found": "item", "share": 1.0, "loose_share": 1.0, "numbers": 1.0, "longest_run": 9}
    presence |= {"document": "@SUM(A1)", "documents": 3, "passage": "-1 is negative"}
    presence["differences"] = [["a", NASTY], ["case", ""]]
    effect: Any = {"loss": 1.0, "base_loss": None, "control_loss": -0.5, "influence_share": 0.1}
    controls: Any = {"kind": "file", "like": "item", "count": 30, "sources": 30, "power": 0.9, "together": 2}
    document = Document(NASTY, text="a b c <b>text</b>", line=1)
    return replace(Finding(document, verdict, "", 0.01, 0.02, presence, effect, controls), **changed)


def test_texts_are_no_formulas_and_numbers_stay_numbers() -> None:
    (row,) = csv.DictReader(io.StringIO(to_csv([finding()])))
    assert row["item"] == f"'{printable(NASTY)}" and json.loads(row["presence.differences"])[1] == [
        "case",
        "",
    ]
    assert row["presence.document"] == "'@SUM(A1)" and row["presence.passage"] == "'-1 is negative"
    assert row["effect.control_loss"] == "-0.5" and row["controls.together"] == "2"


def test_the_summary_is_of_items_that_were_tested() -> None:
    few = {**finding().controls, "count": 4, "power": 0.1, "together": None}
    weak = {**finding().controls, "power": 0.8, "count": 50, "together": 3}
    found = [finding(NOTHING, p=None, q=None, controls=few), finding(), finding(controls=weak)]
    said = "50 controls, from a file: they find 80% of items whose loss was halved, where 3 or more are such"
    assert summary(found)[2].startswith(said)


def page_of(findings: list[Finding]) -> str:
    attributes = {"model_path": NASTY, "fingerprints": {"corpus": "0123", "model": "4567"}}
    index: Any = SimpleNamespace(path=Path(NASTY), n_documents=1, digest="89ab", attributes=attributes)
    return render_page(findings, benchmark=NASTY, index=index)


def test_sarif_and_page_steer_nothing() -> None:
    sarif, page = to_sarif([finding()]), page_of([finding()])
    for text in (sarif, page):
        assert not set(text) & set("\x1b\x07\u202e")
    (result,) = json.loads(sarif)["runs"][0]["results"]
    assert result["properties"]["item"] == NASTY
    assert page.count("<script>") == 1  # its own
    assert r"\x1b]0;owned\x07\u202e" in page and "&lt;b&gt;text" in page


def test_a_page_says_what_was_found_and_what_could_not_be() -> None:
    reason = "controls come from 5 texts, and it takes 20"
    nothing = {"p": None, "q": None}
    findings = [finding(), finding(UNDECIDED, reason=reason), finding(PRESENT), finding(NOTHING, **nothing)]
    page = page_of(findings)
    assert "<b>1 of 4 items was leaked and learnt; 1 is undecided.</b>" in page
    assert [page.count(f'data-verdict="{number}"') for number in range(4)] == [1, 1, 1, 1]
    assert len(set(_MARKS.values())) == 4 and all(f"{mark} {said}" in page for said, mark in _MARKS.items())
    assert reason in page and "--controls FILE" in page and page.count("q = ") == 5
    assert "No item was found to be leaked and learnt, of 2" in page_of(findings[2:])
    rules = {each["ruleId"] for each in json.loads(to_sarif(findings))["runs"][0]["results"]}
    assert rules == {"leaked", "undecided", "present"}
