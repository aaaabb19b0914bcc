"""Indexes and models from elsewhere, moved or changed: what they may not do, and where things are found."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from stride_cli.models.spec import ModelSpec

PROMPT = '"The French Revolution began in" --response " 1789" --read 0'

BRINGS_CODE = """
from pathlib import Path

Path({marker!r}).touch()
"""


def edit(file: Path, **changes: Any) -> None:
    found = json.loads(file.read_text())
    file.write_text(json.dumps({**found, **changes}))


@pytest.fixture
def together(workspace: Path, tmp_path: Path) -> Path:
    """A directory with corpus.jsonl, model/ and run.stride/, all of it moved after it was made."""
    folder = tmp_path / "first"
    folder.mkdir()
    shutil.copytree(workspace / "model", folder / "model")
    shutil.copytree(workspace / "run.stride", folder / "run.stride")
    shutil.copy(workspace / "corpus.jsonl", folder)
    return Path(folder.rename(tmp_path / "moved"))


@pytest.fixture
def nothing_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def test_a_model_that_brings_code_is_refused(run, workspace: Path, together: Path, tmp_path: Path) -> None:
    marker, model = tmp_path / "marker", together / "model"
    for name in ("configuration_own", "modeling_own", "tokenization_own"):
        (model / f"{name}.py").write_text(BRINGS_CODE.format(marker=str(marker)))
    classes = {"AutoConfig": "configuration_own.Own", "AutoModelForCausalLM": "modeling_own.Own"}
    edit(model / "config.json", model_type="own", auto_map=classes)
    tokenizer = {"AutoTokenizer": [None, "tokenization_own.Own"]}
    yes = "y\n" * 9
    for command in (
        f"model info {model}",
        f"index build {together}/corpus.jsonl --model {model} --out {tmp_path}/new.stride",
        f"index plan {together}/corpus.jsonl --model {model}",
        f"model finetune {together}/corpus.jsonl --model {model} --out {tmp_path}/tuned",
        f"query - --index {together}/run.stride --json",
        f"query - --index {together}/run.stride --model {model} --json --trust-code",
    ):
        result = run(command, stdin=yes)
        assert result.code == 2 and result.out == "", command
        assert f"'{model}' can only be loaded by running Python code" in result.err
        assert "config.json, configuration_own.Own" in result.err and "\n  fix: " in result.err
    # an architecture that transformers has itself is loaded as that; a tokenizer that it has not is refused
    edit(model / "config.json", model_type="nanochat")
    edit(model / "tokenizer_config.json", auto_map=tokenizer, tokenizer_class="Own")
    result = run(f"query - --index {together}/run.stride --json", stdin=yes)
    assert (result.code, result.out) == (2, "") and "running Python code" in result.err
    shutil.copy(workspace / "model" / "tokenizer_config.json", model)
    assert run(f"model info {model}", stdin=yes).code == 0
    assert not marker.exists()


def test_kernels_of_the_hub_are_refused(run, together: Path) -> None:
    edit(together / "model" / "config.json", attn_implementation="someone/attention")
    result = run(f"query {PROMPT} --index {together}/run.stride")
    assert result.code == 2 and "'someone/attention'" in result.err
    assert "fix: take that line out" in result.err


def test_index_and_model_are_moved_together(
    run, workspace: Path, together: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nothing_remembered
) -> None:
    for file in (together / "run.stride").rglob("*.json"):
        assert str(workspace.parent) not in file.read_text() and str(Path.home()) not in file.read_text()
    (info,) = run(f"index info {together}/run.stride --json").records
    assert info["model_path"] == "../model" and info["config"]["sources"] == ["../corpus.jsonl"]
    monkeypatch.chdir(together / "run.stride")
    there = run(f"query {PROMPT} --index . --json")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link.stride").symlink_to(together / "run.stride")
    linked = run(f"query {PROMPT} --index link.stride --json")
    assert there.code == linked.code == 0, there.err + linked.err
    assert there.records[0]["hits"] == linked.records[0]["hits"]
    (together / "model").rename(together / "other")
    gone = run(f"query {PROMPT} --index {together}/run.stride")
    assert gone.code == 2 and f"there is no model at '{together / 'model'}'" in gone.err
    assert "fix: give its path with --model" in gone.err
    assert run(f"query {PROMPT} --index {together}/run.stride --model {together}/other").code == 0


def test_a_copy_of_the_index_alone_knows_the_way_on_this_machine(
    run, workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "deep" / "er").mkdir(parents=True)
    copy = shutil.copytree(workspace / "run.stride", tmp_path / "deep" / "er" / "run.stride")
    assert run(f"query {PROMPT} --index {copy}").code == 0
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert run(f"query {PROMPT} --index {copy}").code == 2


@pytest.mark.parametrize("changes", [{"rms_norm_eps": 0.01}, {"rope_parameters": None}])
def test_changed_settings_are_refused_with_both_fingerprints(
    run, together: Path, changes: dict[str, Any]
) -> None:
    from stride_cli.models.language.fingerprints import settings_fingerprint

    model = together / "model"
    before = settings_fingerprint(model)
    if "rope_parameters" in changes:
        rotary = json.loads((model / "config.json").read_text())["rope_parameters"]
        changes = {"rope_parameters": {**rotary, "rope_theta": 77.0}}
    edit(model / "config.json", **changes)
    result = run(f"query {PROMPT} --index {together}/run.stride")
    assert result.code == 3 and result.out == ""
    (record,) = run(f"model info {model} --json").records
    assert before in result.err and record["settings_fingerprint"] in result.err
    assert "fix: put its config.json" in result.err


@pytest.mark.slow
def test_an_index_downloads_no_model(
    run, workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nothing_remembered
) -> None:
    import huggingface_hub

    from stride_cli.corpus.build import IndexedModel, build_index
    from stride_cli.models.language.tokenizer import load_tokenizer
    from stride_cli.models.loading import load_model

    tokenizer, model = (
        load_tokenizer(workspace / "model"),
        load_model(ModelSpec(workspace / "model", device="cpu")),
    )
    index = tmp_path / "run.stride"
    named = IndexedModel(tokenizer, model.tokenizer_fingerprint, model.fingerprint, "someone/model")
    build_index([str(workspace / "corpus.jsonl")], named, index)
    cached, fetched = False, []

    def snapshot(name: str, *, local_files_only: bool = False, **options: Any) -> str:
        if local_files_only and not cached:
            raise OSError("not in the cache")
        if not local_files_only:
            fetched.append(name)
        return str(workspace / "model")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    train = f"train --index {index} --no-calibration --project 0 --space logit"
    for command in (train, f"index append {workspace}/corpus.jsonl --index {index}"):
        result = run(command)
        assert result.code == 2 and fetched == [], result.err
        assert f"index '{index}' names the hub model 'someone/model'" in result.err
        assert "--model someone/model" in result.err and "STRIDE_GENERAL_ALLOW_DOWNLOAD" in result.err
    cached = True
    result = run(f"index append {workspace}/corpus.jsonl --index {index}")
    assert result.code == 2 and "hub" not in result.err and fetched == []  # its documents are there already
    cached = False
    result = run(f"STRIDE_GENERAL_ALLOW_DOWNLOAD=1 {train}")
    assert result.code == 0 and "someone/model" in fetched, result.err
    fetched.clear()
    monkeypatch.setenv("STRIDE_GENERAL_ALLOW_DOWNLOAD", "true")
    assert run(f"query {PROMPT} --index {index}").code == 0 and fetched
