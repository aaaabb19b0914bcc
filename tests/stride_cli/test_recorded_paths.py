"""Paths from an index's directory: found again wherever both are, through links, and for a zip file too."""

from __future__ import annotations

from pathlib import Path

import pytest

from index_format.location import RemotePath
from stride_cli.remembered import find_recorded, recorded_path


def test_beside_below_and_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = tmp_path / "work" / "run.stride"
    assert recorded_path(tmp_path / "work" / "model", index) == "../model"
    assert recorded_path(tmp_path / "data" / "*.jsonl", index) == "../../data/*.jsonl"
    assert recorded_path(index / "model", index) == "./model"
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    assert recorded_path("model", "run.stride") == recorded_path("../work/model", index) == "../model"
    assert recorded_path(".", "run.stride") == ".." and recorded_path("..", "run.stride") == "../.."


def test_through_links(tmp_path: Path) -> None:
    deep = tmp_path / "a" / "b"
    deep.mkdir(parents=True)
    (tmp_path / "short").symlink_to(deep)
    (deep / "model-2").mkdir()
    (deep / "model").symlink_to("model-2")
    # the way is resolved, the name of the model is not
    assert recorded_path(tmp_path / "short" / "model", tmp_path / "short" / "run.stride") == "../model"
    (deep / "run.stride").mkdir()
    (tmp_path / "link.stride").symlink_to(deep / "run.stride")
    assert find_recorded("../model", tmp_path / "link.stride") == str(deep / "model")
    (tmp_path / "other").mkdir()  # beside the link, as the user sees it
    assert find_recorded("../other", tmp_path / "link.stride") == str(tmp_path / "other")


def test_what_is_not_from_the_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "c.jsonl").touch()
    monkeypatch.chdir(tmp_path)
    index = tmp_path / "x" / "run.stride.zip"
    assert find_recorded("../../model", index) == str(tmp_path / "model")  # a zip file in its place
    assert find_recorded("../../*.jsonl", index) == f"{tmp_path}/*.jsonl"
    assert find_recorded(str(tmp_path / "model"), index) == str(tmp_path / "model")  # by stride 0.1
    assert find_recorded("someone/model", index) is None and find_recorded("../gone", index) is None
    assert find_recorded("./model", RemotePath("https://host/run.stride")) is None
