"""`stride select` and `stride evaluate selection` on a small real run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def task(workspace: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two queries of two tasks: the first words of two documents of the corpus, and how they go on."""
    path = tmp_path_factory.mktemp("select") / "task.jsonl"
    source = {document["id"]: document["text"] for document in lines(workspace / "corpus.jsonl")}
    queries = []
    for number, name in enumerate(("history/french-revolution", next(iter(source)))):
        words = source[name].split()
        prompt, response = " ".join(words[:12]), " ".join(words[12:30])
        queries.append({"id": f"q{number}", "task": f"t{number}", "prompt": prompt, "response": response})
    path.write_text("".join(json.dumps(query) + "\n" for query in queries), encoding="utf-8")
    return path


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_three_files_of_the_same_size(run, workspace: Path, task: Path, tmp_path: Path) -> None:
    result = run(f"select {task} --index {workspace}/run.stride --size 6 --out {tmp_path}/out")
    assert result.code == 0, result.err
    (record,) = result.records
    assert record["schema"] == "stride.selection/1" and record["size"] == 6
    source = {document["id"]: document for document in lines(workspace / "corpus.jsonl")}
    for name in ("chosen", "random", "bm25"):
        documents = lines(tmp_path / f"out/{name}.jsonl")
        assert len({document["id"] for document in documents}) == 6
        for place, document in enumerate(documents, 1):
            provenance = document.pop("selection")
            assert document["text"] == source[document["id"]]["text"] and provenance["place"] == place
    chosen = lines(tmp_path / "out/chosen.jsonl")
    # each query's own first document is among the first two
    ranking = run(f"baseline stride:stored=true --index {workspace}/run.stride --queries {task} --top 1")
    first = {hit["document"] for record in ranking.records for hit in record["hits"]}
    assert first <= {document["id"] for document in chosen[:2]}
    assert {document["selection"]["query"] for document in chosen} <= {"q0", "q1"}
    again = run(f"select {task} --index {workspace}/run.stride --size 6 --out {tmp_path}/out")
    assert again.code == 2 and "exists already" in again.err


def test_evaluate_selection(run, workspace: Path, task: Path, tmp_path: Path) -> None:
    from stride_cli.schema import json_schema

    jsonschema = pytest.importorskip("jsonschema")
    out = tmp_path / "out"
    assert run(f"select {task} --index {workspace}/run.stride --size 4 --out {out}").code == 0
    line = f"evaluate selection {out} --model {workspace}/model --queries {task} --seeds 2 --batch-tokens 256"
    result = run(f"{line} --max-new-tokens 4")
    assert result.code == 0, result.err
    assert [record["set"] for record in result.records] == ["base", "chosen", "random", "bm25"]
    for record in result.records:
        jsonschema.validate(record, json_schema("stride.selection_score/1"))
        assert [group["task"] for group in record["tasks"]] == ["t0", "t1"]
        assert record["loss"]["mean"] > 0 and 0 <= record["f1"]["mean"] <= 1
    assert result.records[1]["seeds"] == 2 and result.records[1]["loss"]["sd"] > 0
    assert sorted(path.suffix for path in (out / "evaluation").iterdir()) == [".json"] * 7  # no models kept
    assert run(f"{line} --max-new-tokens 4").records == result.records  # kept: nothing is trained again
    assert run(f"evaluate selection {tmp_path} --model {workspace}/model --queries {task}").code == 2
