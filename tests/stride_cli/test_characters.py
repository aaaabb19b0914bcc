"""What is shown steers no terminal, and says what was there; JSON and spreadsheets get what it was."""

from __future__ import annotations

import json

import pytest

from stride_cli.characters import cell, html_text, one_line, printable, printable_json

NASTY = "a\tb\r\nc\x1b]0;x\x07\x9b2J\u202egnp\u2066 \udcff\ud800 é 語 😀"


def test_text_is_kept_and_what_steers_is_escaped() -> None:
    shown = r"c\x1b]0;x\x07\x9b2J\u202egnp\u2066 \xff\ud800 é 語 😀"
    assert printable(NASTY) == f"a\tb\n{shown}"
    assert one_line(NASTY) == rf"a\tb\x0d\n{shown}"
    assert html_text("<\x1b>") == r"&lt;\x1b&gt;"


def test_json_says_the_same() -> None:
    written = printable_json(json.dumps(NASTY, ensure_ascii=False))
    assert json.loads(written) == NASTY and written == printable(written) and "語" in written


def test_a_record_is_one_line_to_any_reader() -> None:
    """`str.splitlines` and others end lines at more than line feeds."""
    text = "".join(f"a{end}" for end in "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029")
    written = printable_json(json.dumps(text, ensure_ascii=False))
    assert written.splitlines() == [written] and json.loads(written) == text


@pytest.mark.parametrize("text", ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1"])
def test_a_spreadsheet_takes_no_text_for_a_formula(text: str) -> None:
    assert cell(text) == f"'{text}" and cell(f"a{text}") == f"a{text}"
