"""Saved answers and audits as SQLite, CSV and Parquet: what is in them, and what is refused."""

from __future__ import annotations

import csv
import json
import sqlite3
from pathlib import Path

import pytest

from stride_cli.errors import QueryError
from stride_cli.formats.export import export
from tests.stride_cli.commands.conftest import run_stride

BAD = {"schema": "stride.bad_input/1", "source": "a.txt", "line": 2, "message": "it is empty", "fix": None}


def lines(*records: dict) -> list[str]:
    return [json.dumps(each) + "\n" for each in records]


def read(path: Path) -> list[dict]:
    with path.open(encoding="utf-8", newline="") as text:
        return list(csv.DictReader(text))


def test_a_database_has_answers_with_their_hits(record, audited, tmp_path: Path) -> None:
    saved, audits, out = tmp_path / "answers.jsonl", tmp_path / "audit.jsonl", tmp_path / "answers.sqlite"
    saved.write_text("".join(lines(record(id="a"), BAD, record([0.5, -0.1], read=12))), encoding="utf-8")
    audits.write_text("".join(lines(audited(), audited(item="i2", q=None))), encoding="utf-8")
    done = run_stride(f"export {saved} {audits} --out {out}")
    assert done.code == 0, done.err
    (told,) = done.records
    assert {key: told[key] for key in ("to", "answers", "hits", "audited", "bad_inputs")} == {
        "to": "sqlite", "answers": 2, "hits": 5, "audited": 2, "bad_inputs": 1,
    }  # fmt: skip
    with sqlite3.connect(out) as database:
        database.execute("PRAGMA foreign_keys = ON")
        found = database.execute(
            "SELECT answers.id, list, document, share FROM hits JOIN answers USING (answer) ORDER BY hit"
        ).fetchall()
        assert found == [
            ("a", "hits", "d0", 0.4), ("a", "hits", "d1", 0.05), ("a", "opposers", "d2", 0.03),
            (None, "hits", "d0", 0.5), (None, "opposers", "d1", 0.1),
        ]  # fmt: skip
        assert database.execute("SELECT read, recovery_lambda FROM answers WHERE answer = 2").fetchone() == (
            12,
            0.01,
        )
        assert database.execute("SELECT item, q, lexical_document FROM audits").fetchall() == [
            ("i1", 0.4, "d1"), ("i2", None, "d1"),
        ]  # fmt: skip
        assert database.execute("SELECT source, line FROM bad_inputs").fetchall() == [("a.txt", 2)]
        search = "SELECT count(*) FROM hits_fts WHERE hits_fts MATCH 'capital'"
        assert database.execute(search).fetchone() == (5,)
        assert not database.execute("PRAGMA foreign_key_check").fetchall()
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        with pytest.raises(sqlite3.IntegrityError):
            database.execute("INSERT INTO hits (answer) VALUES (99)")
        keys = database.execute("PRAGMA foreign_key_list(hits)").fetchall()
        assert keys[0][2] == "answers"


def test_one_kind_goes_into_a_table(record, audited, tmp_path: Path) -> None:
    counts = export([("a", lines(record(), BAD, record()))], "csv", tmp_path / "hits.csv")
    assert counts == {"answers": 2, "hits": 6, "bad_inputs": 1}
    rows = read(tmp_path / "hits.csv")
    assert [row["answer"] for row in rows] == ["1"] * 3 + ["2"] * 3
    export([("a", lines(audited()))], "csv", tmp_path / "leaks.csv")
    (row,) = read(tmp_path / "leaks.csv")
    assert row["lexical_passage"] == "'=1+1" and row["effect_control_loss"] == "2.0"
    export([("a", lines(audited()))], "parquet", tmp_path / "leaks.parquet")
    from pyarrow import parquet

    assert parquet.read_table(tmp_path / "leaks.parquet").to_pylist()[0]["effect_strongest_chunk"] is None
    with pytest.raises(QueryError, match=r"a:2 is a stride.audit/1 record after stride.answer/1"):
        export([("a", lines(record(), audited()))], "csv", tmp_path / "mixed.csv")
    assert not list(tmp_path.glob("mixed*"))


@pytest.mark.parametrize("to", ["sqlite", "csv", "parquet"])
@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("{", "a:2 is no JSON"),
        ('{"schema": "stride.train/1"}', "a:2 is a stride.train/1 record"),
        ('{"schema": "stride.audit/1"}', "a:2 is a damaged stride.audit/1 record: item is missing"),
        (r'{"prompt": "\ud800"}', "half of a surrogate pair"),
        ('{"read": 9223372036854775808}', "a:2 is a damaged answer: read is larger"),
    ],
)
def test_a_bad_line_is_named_and_nothing_is_replaced(
    record, tmp_path: Path, to: str, bad: str, message: str
) -> None:
    out = tmp_path / "out"
    out.write_text("before")
    second = bad
    if "schema" not in bad and bad != "{":
        second = json.dumps(record(**json.loads(bad)))
    with pytest.raises(QueryError, match=message):
        export([("a", [*lines(record()), second])], to, out)
    assert out.read_text() == "before" and [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_cannot_be_exported_is_refused(record, tmp_path: Path) -> None:
    saved = tmp_path / "answers.jsonl"
    saved.write_text("".join(lines(record())), encoding="utf-8")
    for line, message in (
        (f"export {saved} --out {tmp_path}/answers", "says no format"),
        (f"export {tmp_path}/none.jsonl --out {tmp_path}/a.csv", "there is no file"),
        (f"export {saved} --out {tmp_path}/no/a.csv", "there is no directory"),
        (f"export - --out {tmp_path}/a.db", "there is no record"),
    ):
        done = run_stride(line)
        assert done.code == 2 and message in done.err, done.err
    with pytest.raises(QueryError, match="there is no answer and no item"):
        export([("a", lines(BAD))], "csv", tmp_path / "a.csv")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["answers.jsonl"]
