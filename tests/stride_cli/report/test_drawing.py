"""Ticks, labels and files of the pages."""

from __future__ import annotations

from pathlib import Path

import pytest

from stride_cli.errors import UsageError
from stride_cli.report.drawing import check_place, ticks_for, write_whole
from stride_cli.research.pages.drawing import apart, interval_plot


@pytest.mark.parametrize("span", [(0.0, 0.0), (-0.03, 0.6), (0.0, 1e-4), (-1.0, 1.0), (0.2, 0.31)])
def test_ticks_enclose_and_are_few(span: tuple[float, float]) -> None:
    ticks = ticks_for(*span)
    assert ticks[0] <= span[0] and ticks[-1] >= span[1] - 1e-9 and 2 <= len(ticks) <= 9


def test_labels_do_not_cover_each_other() -> None:
    for lowest in (200, 60):
        placed = apart([40, 41, 42, 58], [5, 6, 7, 8], lowest)
        assert all(abs(a - b) >= 13 - 1e-9 for n, a in enumerate(placed) for b in placed[:n])
        assert max(placed) <= lowest
    assert apart([10, 11], [0, 500], 100) == [10, 11]


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


def test_a_mean_without_an_interval_is_a_dot() -> None:
    nothing = float("nan")
    drawn = interval_plot(
        [("one", 0.5, nothing, nothing), ("two", 0.3, 0.1, 0.4)], {"one": "red", "two": "blue"}, "x"
    )
    assert "nan" not in drawn and drawn.count("<circle") == 2 and drawn.count('stroke-linecap="round"') == 1
    assert "<title>one: 0.500</title>" in drawn and "<title>two: 0.300, 0.100 … 0.400</title>" in drawn
