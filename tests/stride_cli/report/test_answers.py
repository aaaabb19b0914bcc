"""Saved answers: what is read back, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stride_cli.errors import QueryError
from stride_cli.report.answers import parse_answers, read_answers
from tests.stride_cli.report.conftest import make_hit


def test_answers_come_back_as_they_were_saved(record, tmp_path: Path) -> None:
    saved = [record(), record([0.1], id="b", expected=["d0"], recovery__r_squared=None)]
    file = tmp_path / "answers.jsonl"
    file.write_text("\n\n".join(map(json.dumps, saved)) + "\n", encoding="utf-8")
    assert read_answers(file) == saved


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": 3}, "prompt is 3"),
        ({"scored_tokens": True}, "scored_tokens is True"),
        ({"hits": {}}, "hits is {}"),
        ({"hits": [{**make_hit(1, "d", 1.0), "sign": '"><script>'}]}, "expected supports or opposes"),
        ({"hits": [{"rank": 1}]}, r"hits\[0\].document is missing"),
        ({"recovery": 1}, "recovery is 1"),
        ({"measurement__coverage": "all"}, "measurement.coverage is 'all'"),
        ({"missing": 3}, "missing is 3"),
        ({"loss": float("nan")}, "no JSON"),
        ({"loss": 10**400}, "loss is larger than any number"),
        ({"read": -(10**101)}, "read is larger than any number"),
    ],
)
def test_damage_is_found(record, changes, message: str) -> None:
    with pytest.raises(QueryError, match=message):
        parse_answers([json.dumps(record(**changes))], "a")
