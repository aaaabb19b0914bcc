"""Ticks, labels and files of the pages."""

from __future__ import annotations

from pathlib import Path

import pytest

from stride_cli.report.drawing import write_whole


def test_a_page_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    place = tmp_path / "page.html"
    write_whole(place, "old")
    with pytest.raises(UnicodeEncodeError):
        write_whole(place, "new \ud800")
    assert place.read_text() == "old" and list(tmp_path.iterdir()) == [place]
