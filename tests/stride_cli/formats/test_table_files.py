"""One row a hit: the columns, CSV for spreadsheets, Parquet, frames and what a notebook shows."""

from __future__ import annotations

import csv
import io
import json
import sys
from pathlib import Path

import pytest

from stride_cli.attribution.options import FormatOptions
from stride_cli.commands.answer_output import AnswerOutput
from stride_cli.errors import MissingExtraError, UsageError
from stride_cli.formats.columns import columns_of, hit_columns, hit_rows
from stride_cli.formats.frames import frame, html_table
from stride_cli.schema import RECORDS
from stride_cli.schema.answer_records import AnswerRecord
from tests.stride_cli.commands.test_rendering import answer

COLUMNS = [
    "answer", "id", "verdict", "prompt", "response", "generated", "scored_tokens", "loss", "unit",
    "instead", "pooled", "list", "rank", "document", "influence", "share", "above_line", "sign", "chunk",
    "passage", "label", "seen", "neighbours", "backfilled", "read", "stability",
]  # fmt: skip


def written(out: Path | None, records: list[dict], format: str | None = None) -> None:
    place = AnswerOutput(FormatOptions(format=format, out=None if out is None else str(out)), False)
    with place.opened() as take:
        for each in records:
            take(each)


def test_columns_are_a_promise() -> None:
    """Other programs go by them: a change needs another number in the record's name."""
    assert [column.name for column in hit_columns()] == COLUMNS
    assert set(COLUMNS) | {"schema"} == set(RECORDS["stride.hit_row/1"].__annotations__)


def test_keys_of_objects_within_a_record_are_joined() -> None:
    found = {column.name: column for column in columns_of(AnswerRecord)}
    assert found["recovery_lambda"].kind is float and found["measurement_subsets"].kind is int
    assert found["judged_line"].kind is float and "hits" not in found and "seconds_rank" not in found


def test_what_an_answer_has_is_not_taken_for_a_hits(record) -> None:
    """`read` is a key of both."""
    rows = hit_rows(record(read=40, id="a"), 7)
    assert [row["list"] for row in rows] == ["hits", "hits", "opposers"]
    assert {row["read"] for row in rows} == {None}
    assert {(row["answer"], row["id"]) for row in rows} == {(7, "a")}


@pytest.mark.parametrize("name", ["hits.csv", "hits.parquet"])
def test_a_table_has_a_row_a_hit(record, tmp_path: Path, name: str) -> None:
    answers = [record(id="a"), record([0.5, -0.1], loss=float("nan"))]
    answers[1]["hits"][0] |= {"document": "=cmd|' /C calc'!A0", "passage": 'a,\n"b"\x1b[2J', "read": True}
    written(tmp_path / name, answers)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    if name == "hits.csv":
        with (tmp_path / name).open(encoding="utf-8", newline="") as text:
            rows = list(csv.DictReader(text))
        assert rows[3]["document"] == "'=cmd|' /C calc'!A0" and rows[3]["passage"] == 'a,\n"b"\\x1b[2J'
        assert rows[3]["loss"] == "" and rows[3]["read"] == "True" and float(rows[0]["share"]) == 0.4
    else:
        from pyarrow import parquet

        table = parquet.read_table(tmp_path / name)
        rows = table.to_pylist()
        assert str(table.schema.field("above_line").type) == "bool"  # though all of it is null
        assert rows[3]["document"] == "=cmd|' /C calc'!A0" and rows[3]["passage"].endswith("\x1b[2J")
        assert rows[3]["loss"] is None and rows[3]["read"] is True and rows[0]["share"] == 0.4
    assert list(rows[0]) == COLUMNS and len(rows) == 5
    assert [row["id"] or None for row in rows] == ["a"] * 3 + [None] * 2


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.parquet"])
def test_answers_in_a_file_are_whole_or_not_there(record, tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("before")
    place = AnswerOutput(FormatOptions(out=str(tmp_path / name)), False)
    with pytest.raises(KeyboardInterrupt), place.opened() as take:
        take(record())
        raise KeyboardInterrupt
    assert (tmp_path / name).read_text() == "before" and len(list(tmp_path.iterdir())) == 1
    written(tmp_path / name, [record(), record(id="b")])
    assert (tmp_path / name).stat().st_size > 10 and len(list(tmp_path.iterdir())) == 1


def test_json_is_one_array(record, tmp_path: Path) -> None:
    written(tmp_path / "a.json", [record(), record(id="b")])
    written(tmp_path / "b.json", [])
    assert [each.get("id") for each in json.loads((tmp_path / "a.json").read_text())] == [None, "b"]
    assert json.loads((tmp_path / "b.json").read_text()) == []


def test_tables_go_to_stdout(record, monkeypatch, capsys) -> None:
    written(None, [record()], "csv")
    assert capsys.readouterr().out.splitlines()[0] == ",".join(COLUMNS)
    pipe = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    monkeypatch.setattr(sys, "stdout", pipe)
    written(None, [record()], "parquet")
    from pyarrow import parquet

    assert parquet.read_table(io.BytesIO(pipe.buffer.getvalue())).num_rows == 3


def test_formats_that_cannot_be_are_refused(monkeypatch, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--json writes JSON lines, and the format is csv"):
        AnswerOutput(FormatOptions(out=str(tmp_path / "a.csv")), True)
    with pytest.raises(UsageError, match="there is no directory"):
        AnswerOutput(FormatOptions(out=str(tmp_path / "no" / "a.csv")), False)
    assert AnswerOutput(FormatOptions(out=str(tmp_path / "a.txt")), False).format == "jsonl"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert AnswerOutput(FormatOptions(), False).format == "text"
    assert AnswerOutput(FormatOptions(), True).format == "jsonl"
    with pytest.raises(UsageError, match="no text to show on a terminal"):
        AnswerOutput(FormatOptions(format="parquet"), False)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(MissingExtraError) as caught:
        AnswerOutput(FormatOptions(format="parquet"), False)
    assert "[parquet]" in str(caught.value.fix)


def test_a_frame_has_the_same_columns(record, monkeypatch) -> None:
    pandas = pytest.importorskip("pandas")
    found = frame(record(id="a", verdict="clear"))
    assert list(found.columns) == COLUMNS and len(found) == 3
    assert found["share"].tolist() == [0.4, 0.05, 0.03] and found["chunk"].dtype == "int64"
    assert found["above_line"].dtype == "boolean" and found["above_line"].isna().all()
    assert found.groupby("list")["influence"].sum()["opposers"] == pytest.approx(-0.06)
    empty = frame(record([]))
    assert len(empty) == 0 and (empty.dtypes == found.dtypes).all()
    assert len(pandas.concat([found, empty])) == 3
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MissingExtraError, match="pandas") as caught:
        frame(record())
    assert "[frames]" in str(caught.value.fix)


def test_an_answer_is_both_in_python() -> None:
    """By its record, so that what is told there is told here."""
    found = answer()
    shown = found.to_frame()
    assert list(shown.columns) == COLUMNS
    hits = [*found.to_record()["hits"], *found.to_record()["opposers"]]
    assert shown["document"].tolist() == [hit["document"] for hit in hits]
    assert shown["influence"].tolist() == [hit["influence"] for hit in hits]
    assert "history/one" in found._repr_html_() and "by correlation only" in found._repr_html_()


def test_a_notebook_shows_the_verdict_first_and_text_as_text(record) -> None:
    shown = html_table(record(verdict="guessing", judged=None))
    assert shown.startswith("<p><b>Guessing</b>: the model is no surer")
    assert "<script>" not in shown and "&lt;script&gt;" in shown and "&lt;b&gt;nothing&lt;/b&gt;" in shown
    assert shown.count("<table>") == 2 and "40%" in shown
    low = record()
    for place, hit in enumerate(low["hits"]):
        hit["above_line"] = place == 0
    assert html_table(low).count("no stronger, for its loss, than what unrelated prompts get") == 1
