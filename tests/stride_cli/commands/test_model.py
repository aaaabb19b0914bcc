"""`stride model` as a user meets it: exit codes, stdout and stderr apart."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from stride_cli.commands.model import app

TINY = ["--layers", "1", "--width", "16", "--heads", "2", "--vocab", "280", "--context", "32", "--steps", "2"]
WIDE = {"COLUMNS": "200", "TERM": "dumb"}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    path.write_text(
        "".join(json.dumps({"id": str(n), "text": f"Fact {n} is {n * n}."}) + "\n" for n in range(9))
    )
    return str(path)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, corpus: str) -> str:
    out = tmp_path_factory.mktemp("trained") / "model"
    result = run("train", corpus, "--out", str(out), *TINY, "--seed", "3", "--checkpoints", "1")
    assert result.exit_code == 0, result.output
    return str(out)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), env=WIDE)


def test_train_ends_with_one_record(tmp_path: Path, corpus: str) -> None:
    out = tmp_path / "m"
    result = run("train", corpus, "--out", str(out), *TINY)
    assert result.exit_code == 0
    (line,) = result.stdout.splitlines()
    record = json.loads(line)
    assert record["path"] == str(out) and record["documents"] == 9 and record["steps"] == 2
    assert record["loss"] > 0 and record["seconds"] > 0
    # two steps teach nothing, which is said
    assert record["speaks"] is False and "it has not learnt its corpus yet" in result.stderr
    beginnings = [each["beginning"] for each in record["continuations"]]
    assert len(beginnings) == 3 and all(beginning in Path(corpus).read_text() for beginning in beginnings)
    assert all(beginning.strip() in result.stderr for beginning in beginnings)
    assert result.stderr.endswith(f'next: stride ask {corpus} --model {out} "…"\n')


def test_finetune_and_info(tmp_path: Path, corpus: str, model: str) -> None:
    out = tmp_path / "tuned"
    result = run("finetune", corpus, "--model", model, "--out", str(out), "--lora", "2", "--steps", "1")
    assert result.exit_code == 0, result.output
    assert 0 < json.loads(result.stdout)["loss"] <= json.loads(result.stdout)["loss_before"]
    assert "it has hardly learnt its corpus: 1 steps took its loss from" in result.stderr
    base, tuned = (json.loads(run("info", path, "--json").stdout) for path in (model, str(out)))
    assert base["architecture"] == tuned["architecture"] == "NanoChatForCausalLM"
    assert (base["layers"], base["width"], base["context"]) == (1, 16, 32)
    assert base["recipe"]["seed"] == 3 and base["recipe"]["kind"] == "train"
    assert len(base["checkpoints"]) == 1
    assert tuned["recipe"]["base_fingerprint"] == base["fingerprint"] != tuned["fingerprint"]
    assert tuned["recipe"]["lora_rank"] == 2
    assert tuned["tokenizer_fingerprint"] == base["tokenizer_fingerprint"]
