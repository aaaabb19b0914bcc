"""OUT is whole or not there, and an unfinished run is neither lost nor taken for another."""

from __future__ import annotations

from pathlib import Path

import pytest

from index_format.errors import IndexBusy
from stride_cli.errors import UsageError
from stride_cli.training.run_directory import RunDirectory


def finish(run: RunDirectory, content: str) -> None:
    (run.model / "config.json").write_text(content)
    run.publish()


def test_what_is_there_is_kept_until_the_new_is_whole(tmp_path: Path) -> None:
    out = tmp_path / "model"
    with RunDirectory(out, {"a": 1}, overwrite=False) as run:
        finish(run, "old")
    with pytest.raises(UsageError, match="exists"):
        RunDirectory(out, {"a": 2}, overwrite=False)
    with RunDirectory(out, {"a": 2}, overwrite=True) as run:
        assert (out / "config.json").read_text() == "old"
        finish(run, "new")
    assert (out / "config.json").read_text() == "new"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


def test_overwrite_spares_what_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="not a model"):
        RunDirectory(tmp_path / "precious", {}, overwrite=True)
    assert (tmp_path / "precious" / "notes.txt").read_text() == "mine"


def test_one_process_at_a_time(tmp_path: Path) -> None:
    with RunDirectory(tmp_path / "m", {}, overwrite=False), pytest.raises(IndexBusy, match="another process"):
        RunDirectory(tmp_path / "m", {}, overwrite=False)
    with RunDirectory(tmp_path / "m", {}, overwrite=False) as run:
        assert run.resumes
