"""Ticks, labels and files of the pages."""

from __future__ import annotations

from pathlib import Path

import pytest

from stride_cli.errors import UsageError
from stride_cli.report.drawing import check_place, write_whole


def test_a_page_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    place = tmp_path / "page.html"
    write_whole(place, "old")
    with pytest.raises(UnicodeEncodeError):
        write_whole(place, "new \ud800")
    assert place.read_text() == "old" and list(tmp_path.iterdir()) == [place]


def test_places_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    check_place(tmp_path / "page.html")
    with pytest.raises(UsageError, match="no directory"):
        check_place(tmp_path / "none" / "page.html")
    with pytest.raises(UsageError, match="is a directory"):
        check_place(tmp_path)
