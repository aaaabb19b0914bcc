"""What changes a model's answers is in its settings' fingerprint; what a resave changes is not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from stride_cli.models.language.checkpoint import load_weights
from stride_cli.models.language.fingerprints import settings_fingerprint
from stride_cli.models.language.tokenizer import load_tokenizer


@pytest.fixture
def model_dir(saved_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved_model, tmp_path / "model"))


def edit(file: Path, **changes: Any) -> None:
    found = json.loads(file.read_text())
    file.write_text(json.dumps({**found, **changes}))


def test_a_resave_changes_nothing(saved_model: Path, tmp_path: Path) -> None:
    load_weights(saved_model).save_pretrained(tmp_path / "again")
    load_tokenizer(saved_model).save_pretrained(tmp_path / "again")
    assert settings_fingerprint(tmp_path / "again") == settings_fingerprint(saved_model)


@pytest.mark.parametrize(
    "changes",
    [
        {"transformers_version": "4.0", "_name_or_path": "/home/someone/model"},
        {"dtype": "bfloat16", "torch_dtype": "float16"},
        {"use_cache": False, "initializer_range": 0.5, "id2label": {"0": "a"}},
        {"intermediate_size": 64.0},
    ],
)
def test_what_changes_no_answer(saved_model: Path, model_dir: Path, changes: dict[str, Any]) -> None:
    edit(model_dir / "config.json", **changes)
    assert settings_fingerprint(model_dir) == settings_fingerprint(saved_model)


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
        {"rms_norm_eps": 1e-3},
        {"final_logit_softcapping": 3.0},
        {"architectures": ["Other"]},
        {"eos_token_id": 1},
    ],
)
def test_what_changes_answers(saved_model: Path, model_dir: Path, changes: dict[str, Any]) -> None:
    edit(model_dir / "config.json", **changes)
    assert settings_fingerprint(model_dir) != settings_fingerprint(saved_model)


def test_what_ends_an_answer_and_what_lies_beside(saved_model: Path, model_dir: Path) -> None:
    own = settings_fingerprint(saved_model)
    edit(model_dir / "generation_config.json", temperature=0.3, transformers_version="4.0")
    assert settings_fingerprint(model_dir) == own
    edit(model_dir / "generation_config.json", eos_token_id=[1, 2])
    seen = {own, settings_fingerprint(model_dir)}
    edit(model_dir / "tokenizer_config.json", split_special_tokens=True)
    seen.add(settings_fingerprint(model_dir))
    (model_dir / "adapter_config.json").write_text('{"r": 4, "lora_alpha": 8}')
    seen.add(settings_fingerprint(model_dir))
    (model_dir / "adapter_model.bin").write_bytes(b"weights")
    seen.add(settings_fingerprint(model_dir))
    assert len(seen) == 5


def test_rotary_settings_have_one_form(model_dir: Path) -> None:
    file = model_dir / "config.json"
    config = json.loads(file.read_text())
    config.pop("rope_parameters")
    found = []
    for rotary in (
        {"rope_theta": 10000.0, "rope_scaling": None},
        {"rope_parameters": {"rope_theta": 10000, "rope_type": "default"}},
        {"rope_theta": 10000.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_theta": 10000, "rope_type": "linear", "factor": 2}},
    ):
        file.write_text(json.dumps({**config, **rotary}))
        found.append(settings_fingerprint(model_dir))
    assert found[0] == found[1] != found[2] == found[3]
