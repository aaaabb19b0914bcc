"""The suite of sources and anti-documents holds what it says, and counts what it says."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

SUITES = Path(__file__).parents[4] / "examples" / "suites"


@pytest.fixture
def suite(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(SUITES))
    yield importlib.import_module("sources")
    for name in ("sources", "planted"):
        sys.modules.pop(name, None)


def words(text: str) -> set[str]:
    return set(re.findall(r"[a-z]+", text.lower()))


def test_sources_answer_and_anti_documents_do_not(suite: ModuleType, tmp_path: Path) -> None:
    for name in ("one", "two"):
        suite.make(tmp_path / name, 300, 20, 0)
    for file in sorted((tmp_path / "one").iterdir()):
        assert file.read_bytes() == (tmp_path / "two" / file.name).read_bytes()
    rows = {
        name: suite.read_rows(tmp_path / f"one/{name}.jsonl")
        for name in ("corpus", "without", "queries", "base")
    }
    texts = {row["id"]: row["text"] for row in rows["corpus"]}
    assert (len(texts), len(set(texts.values())), len(rows["queries"])) == (1500, 1500, 1200)
    asked = suite.first(rows["queries"])
    assert [row["id"] for row in asked] == [row["id"] for row in rows["queries"][::4]]
    assert {row["id"] for row in rows["without"]} == {name for row in rows["queries"] for name in row["anti"]}
    everything, of_base = (
        words(" ".join(texts.values())),
        words(" ".join(row["text"] for row in rows["base"])),
    )
    for row in rows["queries"]:
        article, named, described = (words(texts[name]) for name in row["causes"])
        shown, hidden = (named, described) if row["kind"] == "named" else (described, named)
        answer = row["response"].lower()
        assert answer in article & named & described
        assert not any(answer in words(texts[name]) for name in row["anti"])
        # a query shares the subject with documents, and no other word of four letters
        subject = {word for word in words(row["prompt"]) if len(word) > 3} & everything
        assert subject <= article & shown and not subject & hidden
        assert len(subject) == (1 if row["kind"] == "named" else 2)
        assert row["kind"] == "described" or not subject & of_base


def test_tables_count_anti_documents_above_sources(suite: ModuleType, tmp_path: Path) -> None:
    suite.make(tmp_path, 24, 2, 0)
    corpus, queries = (suite.read_rows(tmp_path / f"{name}.jsonl") for name in ("corpus", "queries"))
    (tmp_path / "scores").mkdir()
    for name, sign in (("best_one=1", 1.0), ("worst", -1.0), ("none", 0.0)):
        scores = [
            [sign * ((doc["id"] in row["causes"]) - (doc["id"] in row["anti"])) for doc in corpus]
            for row in queries
        ]
        (tmp_path / f"scores/{name}.json").write_text(json.dumps(scores))
    found = list(suite.tables(tmp_path / "queries.jsonl", tmp_path / "corpus.jsonl", tmp_path / "scores"))
    assert [row["queries"] for row in found] == [96] * 3 + [48] * 6
    by_name = {row["method"]: row for row in found if row["kind"] == "all"}
    assert [by_name[name]["anti_above"]["mean"] for name in ("best:one=1", "none", "worst")] == [0, 0.5, 1]
    assert by_name["best:one=1"]["recall@3"]["mean"] == 1
    assert by_name["best:one=1"]["recall@1"]["mean"] == 1 / 3
    assert by_name["none"]["recall@10"]["mean"] == pytest.approx(10 / 120)
    assert by_name["worst"]["anti_above"]["difference"]["mean"] == 1
    assert by_name["worst"]["anti_above"]["best_other"] == "best:one=1"
