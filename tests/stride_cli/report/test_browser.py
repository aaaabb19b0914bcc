"""Pages in a real browser: they load without complaint or request, filter, unfold, fit a phone."""

from __future__ import annotations

from typing import Any

import pytest

from stride_cli.report.page import render_report
from tests.browser import Page, browser

pytestmark = pytest.mark.slow

__all__ = ["browser"]  # a fixture


@pytest.fixture(scope="module")
def report(shown, tmp_path_factory: pytest.TempPathFactory) -> str:
    place = tmp_path_factory.mktemp("page") / "report.html"
    answers = [shown(prompt=f"prompt number {number}") for number in range(6)]
    page = render_report([*answers, shown(prompt="the odd <i>one</i>")], title="seven")
    place.write_text(page, encoding="utf-8")
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
