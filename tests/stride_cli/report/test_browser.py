"""Pages in a real browser: they load without complaint or request, filter, unfold, fit a phone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stride_cli.report.page import write_report
from stride_cli.report.thumbnails import thumbnail
from tests.browser import Page, browser

pytestmark = pytest.mark.slow

__all__ = ["browser"]  # a fixture


@pytest.fixture(scope="module")
def report(shown, tmp_path_factory: pytest.TempPathFactory) -> str:
    place = tmp_path_factory.mktemp("page") / "report.html"
    answers = [shown(prompt=f"prompt number {number}") for number in range(6)]
    write_report(place, [*answers, shown(prompt="the odd <i>one</i>")], title="seven")
    return place.as_uri()


def test_it_loads_quietly_and_asks_for_nothing(browser: Any, report: str) -> None:
    opened = Page(browser, report)
    assert opened.page.locator("article").count() == 7 and opened.page.locator("script").count() == 1
    assert opened.page.locator("article i, article b > b").count() == 0
    assert opened.complaints == []
    assert [url for url in opened.requests if not url.startswith("data:")] == [report]
    opened.close()


def test_the_filter_and_the_folds_work(browser: Any, report: str) -> None:
    opened = Page(browser, report)
    page = opened.page
    visible = "[...document.querySelectorAll('article')].filter(a => !a.hidden).map(a => a.id).join()"
    page.fill("#filter", "ODD one")
    assert page.evaluate(visible) == "q7" and page.inner_text("#count") == "1 of 7"
    assert page.locator("tr[data-for]:not([hidden])").count() == 1
    page.fill("#filter", "")
    assert page.evaluate(visible) == "q1,q2,q3,q4,q5,q6,q7"
    unfolded = page.locator("article > details[open]")
    assert unfolded.count() == 3
    page.click("#unfold")
    assert unfolded.count() == 7
    page.click("#fold")
    assert unfolded.count() == 0
    page.click('a[href="#q5"]')
    page.wait_for_selector("#q5 > details[open]")
    chunk = page.locator("#q5 details.chunk").first
    folded = chunk.bounding_box()["height"]
    chunk.locator("summary").click()
    assert chunk.bounding_box()["height"] > 2 * folded  # the whole of it
    assert opened.complaints == []
    opened.close()


@pytest.mark.parametrize("scheme, paper", [("light", "rgb(255, 255, 255)"), ("dark", "rgb(13, 17, 23)")])
def test_it_fits_a_phone_and_follows_the_colour_scheme(
    browser: Any, report: str, scheme: str, paper: str
) -> None:
    opened = Page(browser, report, width=360, scheme=scheme)
    assert opened.fits()
    assert opened.page.evaluate("getComputedStyle(document.body).backgroundColor") == paper
    opened.close()


@pytest.mark.parametrize("width", [1000, 360])
def test_pictures_of_a_classifier_are_shown(browser: Any, shown, tmp_path: Path, width: int) -> None:
    """Images and rows of a table, decoded by the browser itself, framed by sign."""
    grey = np.arange(64, dtype=np.uint8).reshape(8, 8)
    answers = []
    for picture in (
        thumbnail(grey, 0, 63),
        thumbnail(np.array([1.0, 2.0, 3.0]), np.zeros(3), np.full(3, 3.0)),
    ):
        plain = shown(prompt="row 7 →")
        sides = {
            side: tuple(replace(hit, picture=picture) for hit in getattr(plain, side))
            for side in ("supporters", "opposers")
        }
        answers.append(replace(plain, picture=picture, **sides))
    place = tmp_path / "classes.html"
    write_report(place, answers, title="classes")
    opened = Page(browser, f"{place.as_uri()}#q2", width=width)
    drawn = opened.page.evaluate(
        "[...document.images].map(i => [i.naturalWidth, i.getBoundingClientRect().width])"
    )
    hits = sum(len(answer.supporters) + len(answer.opposers) for answer in answers)
    assert len(drawn) == hits + 2
    assert {size for size, _ in drawn} == {8, 64} and all(size > 60 for _, size in drawn)
    # the bar that stays on top hides nothing of what a link leads to
    bar, card = (opened.page.locator(part).bounding_box() for part in (".tools", "#q2"))
    assert opened.fits() and card["y"] >= bar["y"] + bar["height"]
    colours = "[...document.querySelectorAll('#q1 .thumb')].map(t => getComputedStyle(t).borderColor)"
    assert len(set(opened.page.evaluate(colours))) == 3  # the query's own, supporters, opposers
    assert opened.complaints == []
    opened.close()


def test_a_comparison_fits_its_screen_and_its_plots_can_be_read_on_a_phone(
    browser: Any, tmp_path: Path
) -> None:
    from stride_cli.research.evaluation.compare import Ground, compare_methods
    from stride_cli.research.evaluation.scoring import Run
    from stride_cli.research.pages.comparison_page import write_page

    generator = np.random.default_rng(0)
    ground = Ground.of(generator.normal(size=(10, 2, 4)), None, alpha=0.5)
    named = ["stride:fit=closed,space=mlp-matrix+logit+token-logit+pair-logit,damping=0.1", "tfidf"]
    run = lambda spec: Run(generator.normal(size=(4, 10)), None, 2.0, 0.1, 1200, 3e9)  # noqa: E731
    place = tmp_path / "page.html"
    write_page(place, list(compare_methods(named, ground, run, draws=100)), ground, index_name="run.stride")
    clipped = "[...document.querySelectorAll('.wide')].filter(w => w.scrollWidth > w.clientWidth).length"
    for width, clips in ((1400, 0), (420, 3)):
        opened = Page(browser, place.as_uri(), width=width)
        assert opened.fits()
        assert opened.page.evaluate(clipped) == clips  # boxes that scroll, of which nothing is lost
        drawn = "Math.min(...[...document.querySelectorAll('svg')].map(s => s.clientWidth / 720))"
        assert 12 * opened.page.evaluate(drawn) >= 11  # pixels of the smallest words
        assert opened.complaints == []
        opened.close()
