"""`stride evaluate causes` on a real small model: records, resuming, what counts, bad input."""

from __future__ import annotations

import json
from dataclasses import replace
from html import escape
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import numpy as np
import pytest

from stride_cli.data.workspace import Workspace
from stride_cli.models.spec import ModelSpec
from stride_cli.research.evaluation.cause_scores import KeptRanks
from stride_cli.schema import json_schema


@pytest.fixture(scope="module")
def asked(workspace: Path) -> Path:
    """queries.jsonl beside the index: the beginnings of four documents, which are their causes."""
    documents = [json.loads(line) for line in (workspace / "corpus.jsonl").read_text().splitlines()]
    rows = []
    for number, document in enumerate(documents[:4]):
        words = document["text"].split()
        causes = [document["id"], *([documents[9]["id"]] if number == 2 else [])]
        texts = {"prompt": " ".join(words[:6]), "response": " ".join(words[6:9])}
        rows.append({"id": f"q{number}", **texts, "causes": causes})
    write(workspace / "causes.jsonl", rows)
    return workspace / "causes.jsonl"


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def of(records: list[dict], schema: str) -> list[dict]:
    return [record for record in records if record["schema"] == schema]


def test_methods_are_ranked_judged_compared_and_kept(run, workspace: Path, asked: Path, tmp_path: Path):
    line = (
        f"evaluate causes --index {workspace}/run.stride --queries {asked} --at 1,5 --draws 200 "
        f"--methods tfidf,stride:stored=true,chance,embeddings:model=gone --html {tmp_path}/page.html"
    )
    first = run(line)
    assert first.code == 0, first.err
    for record in first.records:
        jsonschema.validate(record, json_schema(record["schema"]))
    ranks, judged = (of(first.records, f"stride.{name}/1") for name in ("cause_ranks", "causes"))
    assert [record["query"] for record in ranks] == ["q0", "q1", "q2", "q3"] * 3
    by_method = {record["method"]: record for record in judged}
    tfidf, chance = by_method["tfidf"], by_method["chance"]
    assert tfidf["queries"] == tfidf["counted"] == 4 and tfidf["documents"] == 60
    own = [record for record in ranks if record["method"] == "tfidf"]
    assert tfidf["auprc"]["mean"] == pytest.approx(np.mean([r["average_precision"] for r in own]))
    assert tfidf["recall"][0]["mean"] == pytest.approx(np.mean([r["recall"][0]["value"] for r in own]))
    assert own[0]["causes"][0]["rank"] == 1 and len(own[2]["causes"]) == 2
    # against the best other, in both directions, from the same resamples
    best = chance["auprc"]["best_other"]
    assert best in ("tfidf", "stride:stored=true")
    ahead = chance["auprc"]["mean"] - by_method[best]["auprc"]["mean"]
    assert chance["auprc"]["difference"]["mean"] == pytest.approx(ahead)
    assert chance["auprc"]["difference"]["high"] < 0
    failed = by_method["embeddings:model=gone"]
    assert failed["error"] and failed["auprc"]["mean"] is None and "embeddings:model=gone failed" in first.err
    page = (tmp_path / "page.html").read_text()
    assert "Recall@5" in page and escape(failed["error"]) in page
    assert not any(mark in page for mark in ("<script", " src="))

    # a kill in the middle of a line, and a line that is gone: only that is scored anew
    (file,) = (workspace / "run.stride.causes").glob("tfidf-*.jsonl")
    kept = [text for text in file.read_text().splitlines() if text]
    assert len(kept) == 4
    file.write_text("\n".join(kept[:2]) + "\n" + kept[2][:20])
    again = run(line)
    assert of(again.records, "stride.causes/1")[0]["auprc"] == tfidf["auprc"]
    lines = [text for text in file.read_text().splitlines() if text]
    assert lines[:2] == kept[:2] and len(lines) == 5
    fits = [record["seconds"]["fit"] for record in of(again.records, "stride.causes/1")]
    assert fits[0] is not None and fits[1] is None and fits[2] is None


def test_nothing_is_kept_that_something_else_decides(workspace: Path, tmp_path: Path) -> None:
    """The model's precision is in the key; what is asked together, and what is at a path, can not be."""
    opened: Any = Workspace.open(workspace / "run.stride", ModelSpec(device="cpu"))
    coarse = replace(opened, model=SimpleNamespace(dtype="bfloat16"))
    keys = [KeptRanks(each).key("rds", [], np.arange(1)) for each in (opened, opened, coarse)]
    assert keys[0] == keys[1] != keys[2]
    kept = KeptRanks(opened)
    kept.directory = tmp_path
    specs = ["rds", "trackstar:mix=0.5", "ekfac:layers=mlp,checkpoints=a", "embeddings:model=a"]
    for spec in specs:
        kept.add(spec, {"key": {"above": []}})
    assert [bool(kept.read(spec)) for spec in specs] == [True, False, False, False]


def test_only_what_the_model_has_learnt_counts(run, workspace: Path, asked: Path, tmp_path: Path) -> None:
    """One query with the model's own continuation, one with another: the first counts; none does where the
    base model, here the same one, answers it too."""
    from stride_cli.models.loading import load_model

    model = load_model(ModelSpec(workspace / "model", device="cpu"))
    row = json.loads(asked.read_text().splitlines()[0])
    ids = model.tokenizer(row["prompt"], add_special_tokens=False)["input_ids"]
    start = model.tokenizer.bos_token_id
    said = model.tokenizer.decode(model.generate(([start] if start is not None else []) + ids, 6))
    said = " ".join(said.split()[:2])
    rows = [row | {"id": "right", "response": said.upper()}, row | {"id": "wrong", "response": "xylophone"}]
    queries = write(tmp_path / "queries.jsonl", rows)
    line = f"evaluate causes --index {workspace}/run.stride --queries {queries} --methods chance --known"
    result = run(line)
    assert result.code == 0, result.err
    known, judged = of(result.records, "stride.known/1"), of(result.records, "stride.causes/1")[0]
    jsonschema.validate(known[0], json_schema("stride.known/1"))
    assert [record["counts"] for record in known] == [True, False]
    assert (judged["queries"], judged["counted"]) == (2, 1)
    assert {record["query"] for record in of(result.records, "stride.cause_ranks/1")} == {"right"}
    none = run(f"{line} --base {workspace}/model")
    assert none.code == 2 and "the base model 1: none counts" in none.err
