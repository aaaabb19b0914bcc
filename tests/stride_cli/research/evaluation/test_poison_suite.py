"""The suite of wrong facts: which queries count, by dose, and what doses.py makes of the records."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest

SUITES = Path(__file__).parents[4] / "examples" / "suites"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(SUITES))
    yield importlib.import_module
    for name in ("doses", "known", "poison", "facts", "planted"):
        sys.modules.pop(name, None)


def write(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_queries_are_counted_by_the_values_of_a_field(script) -> None:
    rows = [{"dose": dose} for dose in (1, 1, 30, 30, 30)]
    found = script("known").counts(rows, "right", np.array([True, False, True, True, False]), "dose")
    assert found == {
        "queries": 5,
        "right": 3,
        "by": [{"dose": 1, "queries": 2, "right": 1}, {"dose": 30, "queries": 3, "right": 2}],
    }
    assert "by" not in script("known").counts(rows, "right", np.ones(5, bool), None)


def suite(work: Path) -> None:
    """Three facts of doses 1, 2 and 3 with a query each, and one more of the second; the second is tested."""
    causes = {"a": ["a0"], "b": ["b0", "b1"], "c": ["c0", "c1", "c2"]}
    write(
        work / "corpus.jsonl", [{"id": each} for own in causes.values() for each in own] + [{"id": "other"}]
    )
    queries = [
        {"id": f"{group}/{n}", "group": group, "dose": len(causes[group]), "causes": causes[group]}
        | {"prompt": f"{group}?", "response": "no"}
        for group, n in (("a", 0), ("b", 0), ("b", 1), ("c", 0))
    ]
    write(work / "known.jsonl", queries)
    write(work / "tested.jsonl", [each for each in queries if each["group"] == "b"])
    ranks = {"a/0": [1], "b/0": [1, 3], "b/1": [1, 2], "c/0": [4, 5, 6]}
    write(
        work / "causes.jsonl",
        [
            {"schema": "stride.cause_ranks/1", "method": "stride:stored=true", "query": query}
            | {"causes": [{"rank": rank} for rank in found]}
            for query, found in ranks.items()
        ],
    )
    one = {"group": "b", "queries": 2, "k": 2, "causes_removed": 1, "odds": 3.0, "shown": 0.5}
    write(
        work / "removal.jsonl",
        [{"method": "stride:stored=true,asked=token", "groups": [one | {"causes_score": 8.0}]}],
    )
    # what is not the query's own counts for nothing
    scores = [[2, 9, 9, 9, 9, 9, 9], [9, 3, 4, 9, 9, 9, 9], [9, 5, 0, 9, 9, 9, 9], [9, 9, 9, 1, 1, 1, 9]]
    np.save(work / "scores-stride.npy", np.array(scores, np.float32))


def test_influence_is_told_by_dose_of_what_was_tested_and_of_all_that_counts(script, tmp_path: Path) -> None:
    suite(tmp_path)
    doses = script("doses")
    tested, single, *of_all, growth = doses.tables(tmp_path)
    assert tested["dose"] == 2 and tested["influence"] == 4.0 and tested["named"] == 0.5
    assert tested["recall"] == 0.75 and tested["odds"] == 3.0
    assert "spearman" not in single  # of a single dose nothing grows
    assert [row["influence"] for row in of_all] == [2.0, 6.0, 3.0]
    assert [row["recall"] for row in of_all] == [1.0, 0.75, 0.0]
    assert [row["queries"] for row in of_all] == [1, 2, 1]
    assert growth["of"] == "known" and growth["facts"] == 3 and growth["spearman"] == pytest.approx(0.5)
    assert [each["prompt"] for each in doses.asked(tmp_path)] == ["b?"]


def test_scores_of_another_corpus_are_refused(script, tmp_path: Path) -> None:
    suite(tmp_path)
    np.save(tmp_path / "scores-stride.npy", np.zeros((4, 6), np.float32))
    with pytest.raises(SystemExit, match="not queries × documents"):
        script("doses").tables(tmp_path)
