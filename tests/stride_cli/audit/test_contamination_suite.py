"""The contamination suite's corpora hold what they say, and its tables count what they say."""

from __future__ import annotations

import importlib
import json
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

SUITES = Path(__file__).parents[3] / "examples" / "suites"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(SUITES))

    def load(name: str) -> ModuleType:
        return importlib.import_module(name)

    yield load
    for name in ("contamination", "contamination_tables", "contamination_accuracy", "passages"):
        sys.modules.pop(name, None)


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def suite(script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two rates and two seeds of a pool of 100 documents."""
    articles = [{"id": f"a{n}", "text": f"article {n} " + "word " * 98} for n in range(30)]
    problems = [{"id": f"p{n}", "prompt": f"How much is {n}?", "response": f"#### {n}"} for n in range(60)]
    monkeypatch.setattr(
        sys,
        "argv",
        [
            "contamination.py",
            write(tmp_path / "articles.jsonl", articles),
            *("--train", write(tmp_path / "train.jsonl", problems[:20])),
            *("--test", write(tmp_path / "test.jsonl", problems[20:])),
            *("--out", str(tmp_path / "suite"), "--documents", "100", "--words", "10", "--copies", "5"),
            *("--once", "4", "--unseen", "3", "--clean", "10", "--base", "15", "--seeds", "2"),
            *("--rates", "0", "2"),
        ],
    )
    script("contamination").main()
    return tmp_path / "suite"


def test_each_kind_of_problem_is_where_it_should_be(suite: Path) -> None:
    assert sorted(path.name for path in suite.glob("r*")) == ["r0.0-s0", "r0.0-s1", "r2.0-s0", "r2.0-s1"]
    cell = suite / "r2.0-s1"
    kind = {row["item"]: row["kind"] for row in read(cell / "kinds.jsonl")}
    assert Counter(kind.values()) == {"leaked": 2, "once": 4, "unseen": 3, "clean": 10}
    assert [row["id"] for row in read(cell / "benchmark.jsonl")] == list(kind)

    def copies(name: str) -> Counter:
        there = Counter(row["prompt"] for row in read(cell / name) if "prompt" in row)
        return Counter({row["id"]: there[row["prompt"]] for row in read(cell / "benchmark.jsonl")})

    trained, indexed = copies("corpus.jsonl"), copies("indexed.jsonl")
    times = {"leaked": (5, 5), "once": (1, 1), "unseen": (0, 5), "clean": (0, 0)}
    assert all((trained[item], indexed[item]) == times[kind[item]] for item in kind)
    assert len(read(cell / "corpus.jsonl")) == 100 and len(read(cell / "indexed.jsonl")) == 115
    controls = {row["id"] for row in read(cell / "controls.jsonl")}
    assert len(controls) == 40 - 19 and not controls & set(kind)
    assert {kind[row["id"]] for row in read(cell / "queries.jsonl")} == {"leaked", "unseen"}


def test_the_base_corpus_shares_nothing_with_the_pools(suite: Path) -> None:
    base = {row["id"] for row in read(suite / "base.jsonl")}
    assert len(base) == 30
    for cell in suite.glob("r*"):
        assert not base & {row["id"] for row in read(cell / "indexed.jsonl")}


def test_a_folder_that_is_whole_is_left_alone(suite: Path, script) -> None:
    marked = suite / "r2.0-s0" / "corpus.jsonl"
    marked.write_text("mine")
    script("contamination").main()
    assert marked.read_text() == "mine"


def test_zeros_and_wide_ties_are_in_no_bucket(script) -> None:
    top = script("contamination_tables")._top
    assert top(np.array([3.0, 2.0, 1.0, 0.0]), 2).tolist() == [True, True, False, False]
    assert not top(np.zeros(5), 2).any()
    assert top(np.array([1.0, 1.0, 1.0, 0.0]), 2).tolist() == [True, True, True, False]  # mid-rank 2
    assert not top(np.array([1.0] * 5), 2).any()  # mid-rank 3


def test_scores_are_told_beside_their_mean_size(script) -> None:
    tables = script("contamination_tables")
    scores = {"stride": np.array([[6.0, 2.0, -4.0, 0.0], [1.0, -1.0, 0.0, 2.0]])}
    said = tables.Scored(scores, np.array(["a", "a", "b", ""]), ["a", "b"])
    leaked, unseen = tables.score_rows(said, {"a": "leaked", "b": "unseen"})
    assert (leaked["method"], leaked["kind"], leaked["problems"]) == ("stride", "leaked", 1)
    assert [leaked[key] for key in ("copies", "highest", "highest_other")] == [4 / 3, 2.0, 0.0]
    assert [unseen[key] for key in ("copies", "highest", "highest_other")] == [0.0, 2.0, 2.0]


def test_answers_are_the_numbers_behind_the_marks(script) -> None:
    answer_in = script("contamination_accuracy").answer_in
    assert answer_in("so 3 * 4 = 12\n#### 1,200.\n#### 7") == "1200"
    assert answer_in("#### $-3") is None and answer_in("#### -3") == "-3" and answer_in("12") is None


def test_verdicts_are_counted_by_kind(script, tmp_path: Path) -> None:
    kinds = {"a": "leaked", "b": "leaked", "c": "once", "d": "unseen", "e": "clean"}
    found = {"a": 0.01, "b": 0.2, "c": 0.01, "d": 0.01, "e": 0.9}
    write(
        tmp_path / "audit.jsonl",
        [
            {
                "item": item,
                "q": q,
                "p": q,
                "presence": {"found": "item" * (item != "e")},
                "controls": {"count": 50},
            }
            for item, q in found.items()
        ],
    )
    write(
        tmp_path / "accuracy.jsonl",
        [{"model": "model", "item": item, "answer": item == "a"} for item in found],
    )
    (row,) = script("contamination_tables").audit_rows(tmp_path, kinds, 0.05)
    assert row["effect"]["leaked"] == [1, 2] and row["effect"]["leaked, answered"] == [1, 1]
    assert (row["false_discoveries"], row["discoveries"], row["once"]) == (1, 2, 1)
    assert row["null_p_below_0.05"] == 0.5 and row["present"]["clean"] == [0, 1]
