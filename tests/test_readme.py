"""Every command block of the README, run as written from an empty directory."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest

from stride_cli.schema import json_schema
from tests.kept import kept
from tests.prepared import Prepared

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
INSTALL, TESTS, WALK, CHECKPOINTS, EVALUATE = BLOCKS


@pytest.fixture
def shell(tmp_path: Path, prepared: Prepared):
    """Runs a block in bash, in an empty directory unless in another, with this environment's `stride`; stdout
    comes back."""
    tools = prepared.tools()
    if shutil.which("jq") is None:  # the walk pipes through it; this reads one JSON value as `jq .` does
        (tools / "jq").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m json.tool --json-lines\n')
        (tools / "jq").chmod(0o755)
    work = tmp_path / "work"
    work.mkdir()

    def run(block: str, directory: Path = work) -> str:
        environment = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block],
            cwd=directory,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    run.directory = work  # type: ignore[attr-defined]
    return run


@pytest.fixture
def demonstrated(shell, kept_home: Path) -> Path:
    """Where `stride demo` has been run as the README says: by .ci/run, just before, or once for this code."""
    if made := os.environ.get("STRIDE_TEST_DEMO"):
        return Path(made).parent

    def main_job(place: Path) -> None:
        answers = shell(INSTALL.strip().split(" && ")[1], place)
        assert len(answers.splitlines()) == 10

    return kept(kept_home, main_job)


@pytest.mark.slow
def test_the_main_job(shell, demonstrated: Path) -> None:
    """The demo finds the document that states the fact for at least 8 of its 10 prompts."""
    install, command = INSTALL.strip().split(" && ")
    assert install == "pip install ."  # .ci/run does that
    assert (demonstrated / "stride-demo/demo.stride/operators/manifest.json").is_file()
    answers = [json.loads(line) for line in shell(command, demonstrated).splitlines()]
    assert len(answers) == 10
    for answer in answers:
        jsonschema.validate(answer, json_schema("stride.answer/1"))
    assert answers[0]["prompt"] == "The French Revolution began in" and "1789" in answers[0]["response"]
    found = [answer["hits"][0]["document"] in answer["expected"] for answer in answers]
    assert sum(found) >= 8
    # everything is there: it only asks
    facts = [json.loads(line) for line in shell(f"{command} --all", demonstrated).splitlines()]
    prompts = {answer["prompt"] for answer in answers}
    again = [answer for answer in facts if answer["prompt"] in prompts]
    for first, second in zip(answers, again, strict=True):
        # another process may have its arrays at other addresses, and the last bits of a sum depend on that
        influences = {hit["document"]: hit["influence"] for hit in second["hits"]}
        leading = {hit["document"]: hit["influence"] for hit in first["hits"][:5]}
        assert second["response"] == first["response"]
        assert {name: influences[name] for name in leading} == pytest.approx(leading, rel=1e-3, abs=1e-5)
    _verdicts(shell, facts, demonstrated / "stride-demo/demo.stride")


def _verdicts(shell, facts: list[dict], index: Path) -> None:
    """Of the demo's fifty facts at least 45 are clear, of a hundred prompts that have nothing to do with its
    corpus (nonsense, code, everyday talk, other languages, things that do not exist) at most 5."""
    assert len(facts) == 50
    assert sum(answer["verdict"] == "clear" for answer in facts) >= 45
    unrelated = (ROOT / "tests/unrelated_prompts.txt").read_text(encoding="utf-8")
    (shell.directory / "unrelated.txt").write_text(unrelated, encoding="utf-8")
    asked = f"stride query --file unrelated.txt --index {index} --top 1"
    verdicts = [json.loads(line)["verdict"] for line in shell(asked).splitlines()]
    assert len(verdicts) == 100
    assert verdicts.count("clear") <= 5, verdicts


@pytest.mark.slow
def test_the_walk_on_a_corpus_of_ones_own(shell) -> None:
    lines = (ROOT / "stride_cli/demo/corpus.jsonl").read_text(encoding="utf-8").splitlines()
    history = [json.loads(line) for line in lines if '"id": "history/' in line]
    history.sort(key=lambda document: document["id"] != "history/french-revolution")
    chosen = [{**document, "text": document["text"][:80]} for document in history[:30]]
    rows = [json.dumps(document) + "\n" for document in chosen]
    (shell.directory / "corpus.jsonl").write_text("".join(rows), encoding="utf-8")
    output = shell(WALK)
    answer = next(
        value
        for value in _values(output)
        if isinstance(value, dict) and value.get("schema") == "stride.answer/1"
    )
    documents = [hit["document"] for hit in answer["hits"]]
    assert len(documents) == 10 and "history/french-revolution" in documents
    (fitted,) = _values(shell(CHECKPOINTS))
    assert len(fitted["checkpoints"]) >= 2
    # the same index, evaluated: fewer subsets than the block asks for, everything else as written
    lines = [json.dumps({"id": q["id"], "text": q["text"][-50:]}) for q in chosen[1:7]]
    (shell.directory / "queries.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert "--subsets 64 " in EVALUATE
    records = [
        json.loads(line) for line in shell(EVALUATE.replace("--subsets 64 ", "--subsets 4 ")).splitlines()
    ]
    assert [r.get("method") for r in records] == [None, "stride", "tfidf", "ekfac", "trak"]
    assert all("error" not in record for record in records)
    assert (shell.directory / "comparison.html").stat().st_size > 10_000


def test_ci_runs_the_two_commands_word_for_word_and_in_order() -> None:
    lines = (ROOT / ".ci/run").read_text(encoding="utf-8").splitlines()
    first, second = (lines.index(f"{block.strip()} || exit") for block in (INSTALL, TESTS))
    assert (
        first < second < next(n for n, line in enumerate(lines) if line.endswith("python -m pytest -m slow"))
    )


def test_figures_of_recall_are_those_of_the_record() -> None:
    """What README says of stated recall, at the default's bytes a chunk."""
    path = ROOT / "tests/benchmarks/results/recall.jsonl"
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert len(rows) == 40 and all(row["held"] >= 0.95 for row in rows)  # whatever is kept and read
    found = {(row["subsets"], row["read"]): row for row in rows if row["bytes"] == 2048}
    many, few = found[1000, 60], found[64, 100]
    text = " ".join(README.split())
    assert (many["held"], many["queries"], many["chunks"]) == (1.0, 160, 2000)
    assert f"with 60 chunks read (3 %) the median answer states {many['stated']:g} of 10, and all" in text
    figures = f"it states {few['stated']:g}, {few['found']:.1f} are found in the mean, and {few['held']:.2f}"
    assert figures.replace("0.", ".") in text


def test_figures_in_nats_are_those_of_the_record() -> None:
    path = ROOT / "tests/benchmarks/results/nats.jsonl"
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    own, everything = (
        next(row for row in rows if row["what"] == what and row["chunks"] == 2000) for what in ("own", "all")
    )
    assert own["pairs"] == own["models"] == 12 and own["removed"] == 10 and everything["pairs"] == 1920

    def shown(row: dict) -> str:
        return f"{row['slope']:.2f} ± {row['error']:.2f}".replace("0.", ".")

    text = " ".join(README.split())
    assert f"a slope of {shown(own)}" in text and f"{shown(everything)}, r = " in text
    for value in (own["mean_predicted"], own["mean_measured"]):
        assert f"{value:.3f}".replace("0.", ".") in text
    (scratch,) = (row for row in rows if row["what"] == "own" and row["chunks"] != 2000)
    assert f"(slope {shown(scratch)})" in text and f"{1 / scratch['slope']:.1f} times" in text
    assert f"r = {everything['correlation']:.2f}".replace("0.", ".") in text


def test_every_command_is_mentioned() -> None:
    from stride_cli.commands.app import app

    names = [command.name or command.callback.__name__ for command in app.registered_commands]
    names += [group.name for group in app.registered_groups]
    for name in names:
        assert f"stride {name}" in README, name


def _values(text: str) -> list:
    """All JSON values in a text, one after the other."""
    decoder, position, found = json.JSONDecoder(), 0, []
    while position < len(text):
        if text[position].isspace():
            position += 1
            continue
        value, position = decoder.raw_decode(text, position)
        found.append(value)
    return found
