"""Answers as one row a hit: CSV, pandas, and the table of a notebook."""

from __future__ import annotations

import csv
import io
import sys

import pytest

from stride_cli.attribution.frames import frame, hit_columns, html_table
from stride_cli.commands.options import AnswerOptions
from stride_cli.commands.query import AnswerOutput
from stride_cli.errors import MissingExtraError
from stride_cli.schema.answer_records import AnswerOfHit
from tests.stride_cli.commands.test_rendering import answer


def test_csv_has_a_row_a_hit_and_no_formulas(record, capsys: pytest.CaptureFixture[str]) -> None:
    # `read` is a key of both an answer and a hit
    answers = [record(id="a", read=40), record([0.5, -0.1], loss=float("nan"))]
    answers[1]["hits"][0] |= {"document": "=cmd|' /C calc'!A0", "passage": 'a,\n"b"\x1b[2J', "read": True}
    hit = answers[1]["hits"][0]
    with AnswerOutput(AnswerOptions(format="csv")).opened() as take:
        for each in answers:
            take(each)
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert list(rows[0]) == list(hit_columns()) and set(rows[0]) >= {*AnswerOfHit.__annotations__, *hit}
    assert [(row["answer"], row["id"], row["sign"]) for row in rows] == [
        *[("1", "a", "supports")] * 2, ("1", "a", "opposes"), ("2", "", "supports"), ("2", "", "opposes"),
    ]  # fmt: skip
    assert rows[3]["document"] == "'=cmd|' /C calc'!A0" and rows[3]["passage"] == 'a,\n"b"\\x1b[2J'
    assert rows[3]["loss"] == "" and rows[3]["read"] == "True" and rows[0]["read"] == ""


def test_a_frame_has_the_columns_of_hits_and_says_the_prompt_once(monkeypatch, record) -> None:
    pandas = pytest.importorskip("pandas")
    shown, empty = answer().to_frame(), frame(record([]))
    assert list(shown.columns) == [name for name in hit_columns() if name not in AnswerOfHit.__annotations__]
    assert shown.attrs["prompt"] == "The Revolution began in" and (empty.dtypes == shown.dtypes).all()
    record_ = answer().to_record()
    assert shown["document"].tolist() == [hit["document"] for hit in record_["hits"] + record_["opposers"]]
    assert len(pandas.concat([shown, empty])) == len(shown) and shown["title"][1] == "Two Towns"
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MissingExtraError, match="pandas"):
        frame(record())


def test_a_notebook_shows_text_as_text(record) -> None:
    shown = html_table(record(verdict="guessing", judged=None))
    assert shown.startswith("<p><b>Guessing</b>: the model is no surer") and "&lt;script&gt;" in shown
    assert "no source found</p>" in shown and "40%" not in shown and "40%" in html_table(record())
    assert "<script>" not in shown and shown.count("<table>") == 2
