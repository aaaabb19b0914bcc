"""Settings that a search chose, in a stride.yaml of the user's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from stride_cli.config import resolve
from stride_cli.errors import UsageError
from stride_cli.research.tuning.written_settings import write_settings


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", "train:\n  layer: 3\nquery:\n  lambda_ratio: 0.1\n"),
        (
            "# mine\nquery:  # q\n    top: 5\n",
            "# mine\nquery:  # q\n    lambda_ratio: 0.1\n    top: 5\n\ntrain:\n  layer: 3\n",
        ),
        (
            "train:\n  layer: 2  # two\n  rank: 4\n",
            "train:\n  layer: 3  # two\n  rank: 4\n\nquery:\n  lambda_ratio: 0.1\n",
        ),
        (
            "train:\n\n# rank\n  layer:\nquery:\n  top: 2\n",
            "train:\n\n# rank\n  layer: 3\nquery:\n  lambda_ratio: 0.1\n  top: 2\n",
        ),
    ],
)
def test_writing_settings_leaves_the_rest_alone(elsewhere: Path, before: str, after: str) -> None:
    if before:
        (elsewhere / "stride.yaml").write_text(before)
    write_settings({"train.layer": 3, "query.lambda_ratio": 0.1})
    written = (elsewhere / "stride.yaml").read_text()
    assert [line for line in written.splitlines() if line] == [line for line in after.splitlines() if line]
    assert resolve("train", {}).layer == 3 and resolve("query", {}).lambda_ratio == 0.1
    assert [path.name for path in elsewhere.iterdir()] == ["stride.yaml"]


@pytest.mark.parametrize("text", ["train: {layer: 2}\n", "query: 3\n", "train: [\n"])
def test_a_file_that_cannot_be_changed_is_left_as_it_is(elsewhere: Path, text: str) -> None:
    (elsewhere / "stride.yaml").write_text(text)
    with pytest.raises(UsageError):
        write_settings({"train.layer": 3})
    assert (elsewhere / "stride.yaml").read_text() == text
