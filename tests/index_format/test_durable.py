"""What is written beside and then renamed is whole, the old or the new."""

from __future__ import annotations

from pathlib import Path

import pytest

from index_format.durable import replace_file


def test_replaced_in_one_step_or_not_at_all(tmp_path: Path) -> None:
    file = tmp_path / "file"
    replace_file(file, b"old")
    replace_file(file, b"new")
    assert file.read_bytes() == b"new" and [path.name for path in tmp_path.iterdir()] == ["file"]
    (tmp_path / "file.new").mkdir()  # cannot be written
    with pytest.raises(OSError):
        replace_file(file, b"newer")
    assert file.read_bytes() == b"new"
