"""`stride audit` on a small real run: formats, exit codes, bad input."""

from __future__ import annotations

import csv
import io
import json
import shutil
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def files(workspace: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """benchmark.jsonl: three documents of the corpus and three texts that are not in it; controls.jsonl."""
    folder = tmp_path_factory.mktemp("audit")
    corpus = [json.loads(line) for line in (workspace / "corpus.jsonl").read_text().splitlines()]
    others = [
        f"Report {n}: the {a} of the northern {b} was closed for {n + 3} weeks after a {c} damaged its roof."
        for n, (a, b, c) in enumerate(
            [("library", "town", "storm"), ("bakery", "suburb", "flood"), ("stadium", "island", "fire")] * 9
        )
    ]
    items = [{"id": f"in/{n}", "text": corpus[n]["text"][:300]} for n in range(3)]
    items += [{"id": f"out/{n}", "text": text} for n, text in enumerate(others[:3])]
    controls = [{"id": f"control/{n}", "text": text} for n, text in enumerate(others[3:])]
    _write(folder / "benchmark.jsonl", items)
    _write(folder / "controls.jsonl", controls)
    _write(folder / "leaked-controls.jsonl", [*controls[:2], {"id": "oops", "text": corpus[7]["text"]}])
    return folder


def _write(path: Path, records: list[dict]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


@pytest.fixture(scope="module")
def line(workspace: Path, files: Path) -> str:
    return f"audit {files}/benchmark.jsonl --index {workspace}/run.stride --controls {files}/controls.jsonl"


def test_records_and_summary(run, line: str) -> None:
    from stride_cli.schema import json_schema

    jsonschema = pytest.importorskip("jsonschema")
    result = run(line)
    assert result.code == 0, result.err
    assert [record["item"] for record in result.records] == [
        *(f"in/{n}" for n in range(3)),
        *(f"out/{n}" for n in range(3)),
    ]
    for record in result.records:
        jsonschema.validate(record, json_schema("stride.audit/2"))
        assert bool(record["presence"]["found"]) == record["item"].startswith("in/")
        assert 0 < record["p"] <= record["q"] <= 1 and record["controls"]["count"] == 24
    assert all(record["verdict"] == "no evidence" for record in result.records[3:])
    assert "6 items" in result.err and "24 controls, from a file" in result.err
    assert "where 3 or more are such; for a single one it takes 74 controls" in result.err


@pytest.mark.parametrize(("option", "verdict"), [("leak", "leaked and learnt"), ("undecided", "undecided")])
def test_a_verdict_is_an_exit_code(run, line: str, option: str, verdict: str) -> None:
    # with 24 controls, of three items in the corpus all or none is learnt; with 3 nothing is decided
    few = line.partition(" --controls")[0] + " --controls absent"
    for asked in (line, few):
        result = run(f"{asked} --fail-on-{option}")
        failing = [record["item"] for record in result.records if record["verdict"] == verdict]
        assert len(result.records) == 6 and result.code == bool(failing)
        assert ("exit code 1, for " in result.err) == bool(failing) and all(
            each in result.err for each in failing
        )
    assert run(f"{few} --fail-on-undecided").code == 1


def test_csv_sarif_and_html(run, line: str, files: Path) -> None:
    rows = list(csv.DictReader(io.StringIO(run(f"{line} --format csv").out)))
    assert len(rows) == 6 and rows[0]["presence.document"] and float(rows[0]["effect.loss"]) > 0
    sarif = json.loads(run(f"{line} --format sarif").out)
    assert sarif["version"] == "2.1.0" and sarif["$schema"].endswith("sarif-schema-2.1.0.json")
    (done,) = sarif["runs"]
    rules = {rule["id"] for rule in done["tool"]["driver"]["rules"]}
    assert len(done["results"]) == 3
    for number, result in enumerate(done["results"]):
        assert result["ruleId"] in rules and result["message"]["text"]
        place = result["locations"][0]["physicalLocation"]
        assert place["region"]["startLine"] == number + 1
        assert place["artifactLocation"]["uri"].endswith("benchmark.jsonl")
    page = run(f"{line} --format html").out
    assert page.startswith("<!doctype html>") and page.count("<details ") == 6
    assert page.count("<script") == 1 and "script-src 'sha256-" in page  # the filter, and no other
    assert "http:" not in page and "https:" not in page and "in/0" in page


def test_absent_items_as_controls_and_what_to_do_if_they_are_few(run, workspace: Path, files: Path) -> None:
    result = run(f"audit {files}/benchmark.jsonl --index {workspace}/run.stride --controls absent")
    assert result.code == 0, result.err
    found = {(record["controls"]["kind"], record["controls"]["sources"]) for record in result.records}
    assert found == {("absent", 3)}
    assert [record["verdict"] for record in result.records] == ["undecided"] * 3 + ["no evidence"] * 3
    assert "undecided, 3: controls come from 3 texts, and it takes 20" in result.err
    assert "to decide more: --controls FILE" in result.err


def test_bad_input(run, line: str, workspace: Path, files: Path, tmp_path: Path) -> None:
    index = f"--index {workspace}/run.stride"
    bad = run(f"audit {files}/benchmark.jsonl {index} --controls {files}/leaked-controls.jsonl")
    assert bad.code == 2 and "control 'oops' is in the corpus" in bad.err and not bad.out
    (tmp_path / "empty.jsonl").write_text("")
    empty = run(f"audit {tmp_path}/empty.jsonl {index}")
    assert empty.code == 2 and "expected at least one record" in empty.err
    _write(tmp_path / "bare.jsonl", [{"id": "a", "answer": "x"}])
    bare = run(f"audit {tmp_path}/bare.jsonl {index}")
    assert bare.code == 2 and "bare.jsonl:1" in bare.err and "'prompt' and 'response'" in bare.err
    shutil.copytree(workspace / "run.stride", tmp_path / "bare.stride")
    shutil.rmtree(tmp_path / "bare.stride/operators")
    missing = run(f"audit {files}/benchmark.jsonl --index {tmp_path}/bare.stride")
    assert missing.code == 2 and "has no operators" in missing.err and "stride train" in missing.err
    assert run(f"{line} --level 0").code == 2


def test_one_bad_item_stops_no_other(run, line: str, workspace: Path, files: Path, tmp_path: Path) -> None:
    items = (files / "benchmark.jsonl").read_text().splitlines()[:2]
    bad = ["[1]", '{"id": "one", "prompt": "a"}', '{"id": "half", "text": "\\ud800"}']
    (tmp_path / "items.jsonl").write_text("\n".join([items[0], *bad, items[1]]) + "\n")
    shown = f"audit {tmp_path}/items.jsonl --index {workspace}/run.stride --controls {files}/controls.jsonl"
    assert run(shown).code == 2
    recorded = run(f"{shown} --on-bad record")
    assert recorded.code == 2 and "recorded 3 bad items" in recorded.err
    found = [record for record in recorded.records if record["schema"] == "stride.bad_input/1"]
    assert sorted(record["line"] for record in found) == [2, 3, 4]
    assert {record["source"] for record in found} == {f"{tmp_path}/items.jsonl"}
    judged = [record for record in recorded.records if record["schema"] == "stride.audit/2"]
    assert [(record["item"], record["line"]) for record in judged] == [("in/0", 1), ("in/1", 5)]
    skipped = run(f"{shown} --on-bad skip --format csv")
    assert skipped.code == 2 and skipped.err.count("skipped ") == 4
    assert len(list(csv.DictReader(io.StringIO(skipped.out)))) == 2
    refused = run(f"{shown} --on-bad record --format csv")
    assert refused.code == 2 and "--format is csv" in refused.err and refused.out == ""
