"""Settings: order of sources, and every way to write them wrongly."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from stride_cli.config import SECTIONS, resolve, settings
from stride_cli.errors import UsageError


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("STRIDE_TRAIN_NULLS", raising=False)  # set for other tests
    return tmp_path


def test_each_source_overrides_the_one_before(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def top() -> tuple[int, str]:
        return next((s["value"], s["source"]) for s in settings("query") if s["key"] == "query.top")

    assert top() == (10, "default")
    (elsewhere / "stride.yaml").write_text("query:\n  top: 20\n  lambda_ratio: 1\n")
    assert top() == (20, "stride.yaml")
    assert resolve("query", {}).lambda_ratio == 1.0
    monkeypatch.setenv("STRIDE_QUERY_TOP", "30")
    assert top() == (30, "STRIDE_QUERY_TOP")
    assert resolve("query", {"top": 40, "bottom": None}).top == 40
    assert resolve("query", {"top": None}).top == 30


SAMPLES = {bool: True, int: 3, float: 0.5, list: ["x", "y"], str: "x"}
CHOSEN = {
    "train.fit": "sgd",
    "train.nulls": 50,
    "train.residuals": "final",
    "query.measure": "exact",
    "query.estimate": "subsets",
}


def samples() -> dict[str, Any]:
    """A value of every setting."""
    return {
        f"{section}.{name}": CHOSEN.get(f"{section}.{name}")
        or next(SAMPLES[kind] for kind in SAMPLES if kind in entry.kinds)
        for section, declared in SECTIONS.items()
        for name, entry in declared.items()
    }


def test_every_setting_can_be_set_by_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    values = samples()
    for key, value in values.items():
        text = os.pathsep.join(value) if isinstance(value, list) else str(value).lower()
        monkeypatch.setenv(f"STRIDE_{key.replace('.', '_')}".upper(), text)
    found = settings()
    assert {setting["key"]: setting["value"] for setting in found} == values
    assert all(setting["source"].startswith("STRIDE_") for setting in found)


def test_every_setting_can_be_set_in_the_file(elsewhere: Path) -> None:
    values = samples()
    del values["general.trust_code"]  # never: the file may have come with what it would trust
    by_section: dict[str, dict] = {section: {} for section in SECTIONS}
    for key, value in values.items():
        section, name = key.split(".")
        by_section[section][name] = value
    (elsewhere / "stride.yaml").write_text(yaml.safe_dump(by_section))
    found = [setting for setting in settings() if setting["key"] != "general.trust_code"]
    assert {setting["key"]: setting["value"] for setting in found} == values
    assert {setting["source"] for setting in found} == {"stride.yaml"}


@pytest.mark.parametrize(
    ("text", "message", "fix"),
    [
        ("query:\n  topp: 3\n", "there is no setting 'query.topp'", "did you mean query.top?"),
        ("qury:\n  top: 3\n", "found 'qury'", "a section is query"),
        ("query:\n  top: 3\n  read: 5\n  top: 4\n", "'top' stands there twice, again in line 4", "query:"),
        ("query:\n  top: many\n", "query.top is 'many' (expected int)", "write query.top as int"),
        ("query:\n  top: [\n", "is not YAML", "query:"),
        ("general:\n  trust_code: true\n", "sets general.trust_code", "say it with --trust-code"),
    ],
)
def test_mistakes_in_the_file_are_named(elsewhere: Path, text: str, message: str, fix: str) -> None:
    (elsewhere / "stride.yaml").write_text(text)
    with pytest.raises(UsageError) as caught:
        settings()
    assert message in caught.value.message and fix in (caught.value.fix or "")
