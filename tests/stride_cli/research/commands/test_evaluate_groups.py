"""`stride evaluate removal --grouped` on a real small model: records, resuming, bad input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from stride_cli.schema import json_schema

pytestmark = pytest.mark.slow


DEMO = Path(__file__).parents[4] / "stride_cli" / "demo" / "corpus.jsonl"


@pytest.fixture(scope="module")
def trained(run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with corpus.jsonl, a tiny model trained on it, and run.stride with operators."""
    folder = tmp_path_factory.mktemp("groups")
    documents = [json.loads(line) for line in DEMO.read_text(encoding="utf-8").splitlines()[:40]]
    write(folder / "corpus.jsonl", [{"id": each["id"], "text": each["text"][:160]} for each in documents])
    sizes = "--layers 2 --width 32 --heads 2 --vocab 512 --context 128 --epochs 2 --batch-tokens 512"
    for line in (
        f"model train {folder}/corpus.jsonl --out {folder}/model {sizes} --device cpu",
        f"index build {folder}/corpus.jsonl --model {folder}/model --out {folder}/run.stride",
        f"train --index {folder}/run.stride --rank 8",
    ):
        result = run(line)
        assert result.code == 0, result.err
    return folder


@pytest.fixture(scope="module")
def asked(trained: Path) -> list[dict[str, Any]]:
    """Four queries in two groups; what each says are a document's words, and instead of them another's."""
    documents = [json.loads(line) for line in (trained / "corpus.jsonl").read_text().splitlines()]
    words = [document["text"].split() for document in documents[:5]]
    return [
        {
            "id": f"q{number}",
            "group": "ab"[number % 2],
            "prompt": " ".join(words[number][:6]),
            "response": " ".join(words[number][6:9]),
            "instead": " ".join(words[number + 1][6:9]),
            "causes": [documents[number % 2]["id"], documents[2 + number % 2]["id"]],
        }
        for number in range(4)
    ]


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_groups_are_retrained_without_what_is_named(
    run, trained: Path, asked: list[dict], tmp_path: Path
) -> None:
    queries = write(tmp_path / "groups.jsonl", asked)
    line = (
        f"evaluate removal --grouped --index {trained}/run.stride --queries {queries} --top causes,5 "
        "--workers 1 --seeds 1 --draws 1 --methods tfidf,stride:stored=true,asked=odds,add=support"
    )
    first = run(line)
    assert first.code == 0, first.err
    for record in first.records:
        jsonschema.validate(record, json_schema("stride.group_removal/1"))
    called = [(record["method"], record["k"]) for record in first.records]
    methods = ["tfidf", "stride:stored=true,asked=odds,add=support"]
    assert called == [
        *((name, 2) for name in [*methods, "causes", "random"]),
        *((name, 5) for name in [*methods, "random"]),
    ]
    tfidf, _, causes, chance = first.records[:4]
    assert [each["group"] for each in tfidf["groups"]] == ["a", "b"]
    assert [each["causes_removed"] for each in causes["groups"]] == [2, 2]
    assert tfidf["odds_beyond_random"]["mean"] == pytest.approx(
        tfidf["odds"]["mean"] - chance["odds"]["mean"]
    )
    for record in first.records:
        assert record["odds"]["mean"] == pytest.approx(np.mean([each["odds"] for each in record["groups"]]))
        assert record["queries"] == 4 and record["odds"]["seed_se"] is None
    # both groups' causes are four different documents, and the same seed learns from all of them before
    assert causes["groups"][0]["odds_before"] == tfidf["groups"][0]["odds_before"]
    again = run(line)
    assert again.records == first.records and ", 0 of them to be retrained" in again.err
    alone = [{key: value for key, value in row.items() if key not in ("instead", "causes")} for row in asked]
    result = run(
        line.replace("causes,5", "5")
        .replace(",asked=odds", "")
        .replace(str(queries), "{}")
        .format(write(tmp_path / "alone.jsonl", alone))
    )
    assert result.code == 0, result.err
    assert [record["method"] for record in result.records] == [
        "tfidf",
        methods[1].replace("asked=odds,", ""),
        "random",
    ]
    assert all(
        record["odds"]["mean"] is None and record["loss"]["mean"] is not None for record in result.records
    )
