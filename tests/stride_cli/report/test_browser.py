"""The page in a real browser: loads without complaint or request, filters, unfolds, fits a phone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from stride_cli.report.page import write_report
from stride_cli.report.thumbnails import thumbnail

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def page(shown, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("page") / "report.html"
    answers = [shown(prompt=f"prompt number {number}") for number in range(6)]
    write_report(place, [*answers, shown(prompt="the odd <i>one</i>")], title="seven")
    return place


VISIBLE = "[...document.querySelectorAll('article')].filter(a => !a.hidden).map(a => a.id).join()"


def test_loads_quietly_and_asks_for_nothing(browser, page: Path) -> None:
    browser.open(page)
    assert browser.value("document.querySelectorAll('article').length") == 7
    assert browser.value("document.querySelectorAll('script').length") == 1
    assert browser.value("document.querySelectorAll('article i, article b > b').length") == 0
    assert browser.troubles == []
    outside = [url for url in browser.requests if not url.startswith(("file:", "data:"))]
    assert outside == [] and sum(url.startswith("file:") for url in browser.requests) == 1


def test_the_filter_and_the_folds_work(browser, page: Path) -> None:
    browser.open(page)
    typed = "const i = document.getElementById('filter'); i.value = {!r}; i.dispatchEvent(new Event('input'))"
    browser.value("(() => {" + typed.format("ODD one") + "})()")
    assert browser.value(VISIBLE) == "q7"
    assert browser.value("document.getElementById('count').textContent") == "1 of 7"
    assert browser.value("[...document.querySelectorAll('tr[data-for]')].filter(r => !r.hidden).length") == 1
    browser.value("(() => {" + typed.format("") + "})()")
    assert browser.value(VISIBLE) == "q1,q2,q3,q4,q5,q6,q7"
    unfolded = "document.querySelectorAll('article > details[open]').length"
    assert browser.value(unfolded) == 3
    browser.value("document.getElementById('unfold').click()")
    assert browser.value(unfolded) == 7
    browser.value("document.getElementById('fold').click()")
    assert browser.value(unfolded) == 0
    browser.value("document.querySelector('a[href=\"#q5\"]').click()")
    browser.value("new Promise(done => setTimeout(done, 100))")
    assert browser.value("document.querySelector('#q5 > details').open") is True
    assert browser.troubles == []


def test_the_whole_chunk_unfolds(browser, page: Path) -> None:
    browser.open(page)
    chunk = "document.querySelector('details.chunk')"
    height = f"{chunk}.getBoundingClientRect().height"
    folded = browser.value(height)
    browser.value(f"{chunk}.querySelector('summary').click()")
    assert browser.value(height) > 2 * folded


def test_fits_a_phone_and_follows_the_colour_scheme(browser, page: Path) -> None:
    paper = "getComputedStyle(document.body).backgroundColor"
    try:
        browser.call(
            "Emulation.setDeviceMetricsOverride", width=360, height=740, deviceScaleFactor=1, mobile=True
        )
        browser.open(page)
        assert browser.value("document.documentElement.scrollWidth") <= 360
        colours = []
        for scheme in ("light", "dark"):
            feature = {"name": "prefers-color-scheme", "value": scheme}
            browser.call("Emulation.setEmulatedMedia", features=[feature])
            colours.append(browser.value(paper))
        assert colours == ["rgb(255, 255, 255)", "rgb(13, 17, 23)"]
    finally:
        browser.call("Emulation.clearDeviceMetricsOverride")
        browser.call("Emulation.setEmulatedMedia", features=[])


def test_pictures_of_a_classifier_are_shown(browser, shown, tmp_path: Path) -> None:
    """Images and rows of a table, decoded by the browser itself, framed by sign; on a phone too."""
    from dataclasses import replace

    grey = np.arange(64, dtype=np.uint8).reshape(8, 8)
    pictures = [thumbnail(grey, 0, 63), thumbnail(np.array([1.0, 2.0, 3.0]), np.zeros(3), np.full(3, 3.0))]
    answers = []
    for picture in pictures:
        plain = shown(prompt="row 7 →")
        framed = {
            side: tuple(replace(hit, picture=picture) for hit in getattr(plain, side))
            for side in ("supporters", "opposers")
        }
        answers.append(replace(plain, picture=picture, **framed))
    page = tmp_path / "classes.html"
    write_report(page, answers, title="classes")
    try:
        for width in (1000, 360):
            browser.call(
                "Emulation.setDeviceMetricsOverride",
                width=width,
                height=740,
                deviceScaleFactor=1,
                mobile=width < 500,
            )
            browser.open(page, "#q2")
            found = browser.value(
                "[...document.images].map(i => [i.naturalWidth, i.getBoundingClientRect().width]).join(';')"
            )
            drawn = [tuple(map(float, each.split(","))) for each in found.split(";")]
            hits = sum(len(answer.supporters) + len(answer.opposers) for answer in answers)
            assert len(drawn) == hits + 2
            assert {size for size, _ in drawn} == {8.0, 64.0} and all(size > 60 for _, size in drawn)
            assert browser.value("document.documentElement.scrollWidth") <= width
            # the bar that stays on top hides nothing of what a link leads to
            edge = "document.querySelector('.tools').getBoundingClientRect().bottom"
            assert browser.value(f"document.querySelector('#q2').getBoundingClientRect().top - {edge}") >= 0
            colours = "[...document.querySelectorAll('#q1 .thumb')].map(t => getComputedStyle(t).borderColor)"
            assert len(set(browser.value(colours))) == 3  # the query's own, supporters, opposers
        assert browser.troubles == []
    finally:
        browser.call("Emulation.clearDeviceMetricsOverride")


def test_a_comparison_fits_its_screen_and_its_plots_can_be_read_on_a_phone(browser, tmp_path: Path) -> None:
    from stride_cli.research.evaluation.compare import Ground, compare_methods
    from stride_cli.research.evaluation.scoring import Run
    from stride_cli.research.pages.comparison_page import write_page

    generator = np.random.default_rng(0)
    ground = Ground.of(generator.normal(size=(10, 2, 4)), None, alpha=0.5)
    named = ["stride:fit=closed,space=mlp-matrix+logit+token-logit+pair-logit,damping=0.1", "tfidf"]
    run = lambda spec: Run(generator.normal(size=(4, 10)), None, 2.0, 0.1, 1200, 3e9)  # noqa: E731
    page = tmp_path / "page.html"
    write_page(page, list(compare_methods(named, ground, run, draws=100)), ground, index_name="run.stride")
    clipped = "[...document.querySelectorAll('.wide')].filter(w => w.scrollWidth > w.clientWidth).length"
    try:
        for width, clips in ((1400, 0), (420, 3)):
            size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
            browser.call("Emulation.setDeviceMetricsOverride", **size)
            browser.open(page)
            assert browser.value("document.documentElement.scrollWidth") <= width
            assert browser.value(clipped) == clips  # boxes that scroll, of which nothing is lost
            drawn = "Math.min(...[...document.querySelectorAll('svg')].map(s => s.clientWidth / 720))"
            assert 12 * browser.value(drawn) >= 11  # pixels of the smallest words
        assert browser.troubles == []
    finally:
        browser.call("Emulation.clearDeviceMetricsOverride")
