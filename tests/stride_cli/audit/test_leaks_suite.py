"""The suite of leaks in other words: rules keep the answer, corpora hold what they say, tables count."""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

SUITES = Path(__file__).parents[3] / "examples" / "suites"
PAIR = {
    "prompt": "Mia has 16 apples and her brother Tom has 4 more, so they buy 3 bags. How many has Mia?",
    "response": "Mia has 16 + 4 = <<16+4=20>>20 apples in total.\nTom sells 3 of them.\n#### 20",
}
KNOWN = {"has", "apples", "how", "many", "more", "they"}


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(SUITES))
    yield importlib.import_module
    for name in ("leaks", "leaks_rules", "leaks_tables", "planted"):
        sys.modules.pop(name, None)


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("name", ["edit", "names", "numerals", "listed", "worded"])
def test_a_rule_changes_the_words_and_keeps_every_value(script, name: str) -> None:
    rules = script("leaks_rules")
    rule = getattr(rules, name)
    draws = [rule(PAIR, np.random.default_rng(seed), KNOWN) for seed in range(20)]
    assert len({json.dumps(draw) for draw in draws}) > 3  # each copy is another
    for draw in draws:
        assert draw["prompt"] != PAIR["prompt"] and draw["response"] != PAIR["response"]
        numbers = re.findall(r"\d+", re.sub(r"<<.*?>>|^\d\)", "", draw["response"], flags=re.MULTILINE))
        assert numbers == ["16", "4", "20", "3", "20"]
        spelt = "sixteen" if name == "numerals" else "16"
        assert spelt in draw["prompt"] and "_" not in draw["prompt"] + draw["response"]
        same = Counter(re.findall(r"\w+", draw["prompt"])) & Counter(re.findall(r"\w+", PAIR["prompt"]))
        assert sum(same.values()) >= 6  # of 19 words: it is still the same story
        if name != "edit":  # consistently: one other name for each, in prompt and response
            assert not re.search(r"\b(Mia|Tom)\b", draw["prompt"] + draw["response"])
            first, second = (set(re.findall(r"\w+", part)) for part in draw["response"].split("\n")[:2])
            (mia,), (tom,) = first & set(rules.PEOPLE), second & set(rules.PEOPLE)
            assert mia != tom and {mia, tom} <= set(re.findall(r"\w+", draw["prompt"]))
        if name in ("names", "numerals", "worded"):
            assert "apples" not in draw["prompt"] + draw["response"]
    assert ("####" in draws[0]["response"]) is (name != "worded")


def test_a_copy_is_one_and_numbers_are_spelt(script) -> None:
    rules = script("leaks_rules")
    assert rules.copy(PAIR, np.random.default_rng(0), KNOWN) == PAIR
    assert [rules.in_words(n) for n in (0, 13, 20, 47)] == ["zero", "thirteen", "twenty", "forty-seven"]
    held = set(rules.FORMS["held back"])
    assert not held & {rule for form in ("copy", "edit", "rewritten") for rule in rules.FORMS[form]}


@pytest.fixture
def suite(script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One rate and two seeds of a pool of 100 documents."""
    problems = [
        {
            "id": f"p{n}",
            "prompt": f"Mia buys {n} apples for Tom. How many has he?",
            "response": f"He has {n}.\n#### {n}",
        }
        for n in range(150)
    ]
    other = [{"id": f"i{n}", "prompt": f"say {n}", "response": f"{n} it is"} for n in range(100)]
    monkeypatch.setattr(
        sys,
        "argv",
        [
            *("leaks.py", write(tmp_path / "train.jsonl", problems[:80])),
            *(
                write(tmp_path / "test.jsonl", problems[80:]),
                "--filler",
                write(tmp_path / "other.jsonl", other),
            ),
            *("--out", str(tmp_path / "suite"), "--documents", "100", "--copies", "5", "--base", "20"),
            *("--rates", "4", "--seeds", "0", "1", "--held-back"),
        ],
    )
    script("leaks").main()
    return tmp_path / "suite"


def test_each_kind_and_form_is_where_it_should_be(suite: Path) -> None:
    assert sorted(path.name for path in suite.glob("r*")) == ["r4.0-s0", "r4.0-s1"]
    cell = suite / "r4.0-s1"
    kinds = {row["item"]: row for row in read(cell / "kinds.jsonl")}
    counts = Counter((row["kind"], row["form"]) for row in kinds.values())
    forms = ["copy", "edit", "rewritten", "held back"]
    assert counts == {(kind, form): 1 for kind in ("leaked", "unseen") for form in forms} | {
        ("absent", ""): 62
    }
    benchmark = {row["id"]: row for row in read(cell / "benchmark.jsonl")}
    assert set(benchmark) == set(kinds) and len(benchmark) == 70
    corpus, indexed = read(cell / "corpus.jsonl"), read(cell / "indexed.jsonl")
    assert len(corpus) == 100 and indexed[:100] == corpus and len(indexed) == 120
    trained = Counter(row["id"].split("/")[1] for row in corpus if row["id"].startswith("leaked/"))
    untrained = Counter(row["id"].split("/")[1] for row in indexed[100:])
    assert trained == {item: 5 for item, row in kinds.items() if row["kind"] == "leaked"}
    assert untrained == {item: 5 for item, row in kinds.items() if row["kind"] == "unseen"}
    assert not {row["id"] for row in corpus} & {row["id"] for row in read(suite / "base.jsonl")}
    for row in indexed:
        if row["id"].count("/") == 2:
            item = row["id"].split("/")[1]
            assert (row["prompt"] == benchmark[item]["prompt"]) is (kinds[item]["form"] == "copy")


def test_a_folder_that_is_whole_is_left_alone(suite: Path, script) -> None:
    marked = suite / "r4.0-s0" / "corpus.jsonl"
    marked.write_text("mine")
    script("leaks").main()
    assert marked.read_text() == "mine"


def test_verdicts_and_searches_are_counted_by_kind(script, tmp_path: Path) -> None:
    tables: ModuleType = script("leaks_tables")
    kinds = {
        "a": {"kind": "leaked", "form": "copy"},
        "b": {"kind": "leaked", "form": "copy"},
        "c": {"kind": "unseen", "form": "copy"},
    }
    kinds |= {f"n{n}": {"kind": "absent", "form": ""} for n in range(40)}
    verdicts = {"a": ("leaked and learnt", 0.01), "c": ("present, no effect", 0.4)}
    rows = [
        {
            "item": item,
            "verdict": verdicts.get(item, ("no evidence", 1.0))[0],
            "q": verdicts.get(item, ("no evidence", 1.0))[1],
            "p": 0.5,
            "presence": {
                "found": {"a": "item", "b": "other words", "c": "item"}.get(item, ""),
                "share": float(item in "ac"),
            },
            "effect": {"loss": 1.0},
            "controls": {"count": 40},
        }
        for item in kinds
    ]
    write(tmp_path / "audit.jsonl", rows)
    write(tmp_path / "benchmark.jsonl", [{"id": item} for item in reversed(kinds)])
    scores = np.zeros((43, 2), np.float32)
    scores[-1, 1] = 9  # of "a", in the order of the benchmark
    np.save(tmp_path / "bm25.npy", scores)
    found = {(row["kind"], row["form"]): row for row in tables.audit_rows(tmp_path, kinds, 0.05)}
    trained = found["trained", "copy"]
    assert (trained["problems"], trained["tested"], trained["called_leaked"]) == (2, 2, 1)
    assert found["untrained", "copy"]["called_leaked"] == found["absent", ""]["called_leaked"] == 0
    search = {row["method"]: row for row in tables.search_rows(tmp_path, kinds)}
    assert (search["words"]["trained_flagged"], search["words"]["untrained_flagged"]) == (1, 1)
    assert search["words"]["trained_above"] == 0.25  # one is like it, one below
    assert (search["bm25"]["trained_flagged"], search["bm25"]["untrained_flagged"]) == (1, 0)
    assert search["bm25"]["trained_above"] == 0.75
