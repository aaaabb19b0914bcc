"""Settings that a search chose, in a stride.yaml of the working directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from stride_cli.config import resolve
from stride_cli.research.tuning.written_settings import write_settings


def test_settings_are_written_and_a_file_of_ones_own_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert write_settings({"train.layer": 3, "query.lambda_ratio": 0.1}) == Path("stride.yaml")
    written = (tmp_path / "stride.yaml").read_text()
    assert written == "train:\n  layer: 3\nquery:\n  lambda_ratio: 0.1\n"
    assert resolve("train", {}).layer == 3 and resolve("query", {}).lambda_ratio == 0.1
    assert write_settings({"train.layer": 4}) is None
    assert (tmp_path / "stride.yaml").read_text() == written
    assert [path.name for path in tmp_path.iterdir()] == ["stride.yaml"]
