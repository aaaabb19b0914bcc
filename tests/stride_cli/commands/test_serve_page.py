"""The page of `stride serve` in headless Chromium: asked, read and compared by keyboard, wide and narrow, in
light and dark."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from stride_cli.attribution.frames import influence_text
from stride_cli.serve.running import Server
from tests import browser as pages
from tests.browser import browser
from tests.stride_cli.commands.test_serve import PROMPT, server, serving

pytestmark = pytest.mark.slow
__all__ = ["browser", "server"]  # fixtures


class Page(pages.Page):
    """The page at the server's URL."""

    def __init__(self, browser: Any, url: str) -> None:
        super().__init__(browser, url)
        self.page.locator("#options summary").click()
        self.page.focus("#prompt")
        self.page.wait_for_selector("#index option", state="attached")

    def ask(self, prompt: str = PROMPT, *, count: int = 1) -> None:
        """Ask by keyboard: the prompt has the focus when the page opens."""
        self.page.keyboard.type(prompt)
        self.page.keyboard.press("Enter")
        self.wait(count)

    def wait(self, count: int = 1) -> None:
        self.page.wait_for_selector(f'#answers[aria-busy="false"] .answer:nth-child({count}) .token')

    def axe(self) -> list[str]:
        """List what axe-core finds wrong."""
        if not self.page.evaluate("'axe' in window"):
            source = files("axe_playwright_python").joinpath("axe.min.js").read_text(encoding="utf-8")
            self.page.evaluate(source)
        found = self.page.evaluate("axe.run(document, {resultTypes: ['violations']})")
        return [
            f"{each['id']}: {node['html'][:120]}" for each in found["violations"] for node in each["nodes"]
        ]


LOOKS = [(width, scheme) for width in (1400, 420) for scheme in ("light", "dark")]


def test_it_is_readable_wide_and_narrow_light_and_dark(browser: Any, server: Server) -> None:
    """One walk; wherever it comes to, the page is looked at in all four ways."""
    pytest.importorskip("axe_playwright_python", reason="axe-playwright-python holds axe-core")
    opened = Page(browser, server.address.link())
    page = opened.page

    def look(name: str = "") -> Iterator[int]:
        for width, scheme in LOOKS:
            page.set_viewport_size({"width": width, "height": 900})
            page.emulate_media(color_scheme=scheme)
            assert opened.axe() == [] and opened.fits(), (name, width, scheme)
            yield width
            if name:
                _picture(page, f"{name}-{width}-{scheme}")

    assert {*look()} == {1400, 420}
    page.fill("#bottom", "3")
    page.focus("#prompt")
    opened.ask()
    page.locator(".verify summary").click()
    assert page.locator(".token[data-source]").count()  # words with a source are marked
    page.locator(".token").first.focus()
    page.keyboard.press("Space")
    for _ in look("answer"):
        # what was said stands first, then the verdict, verification and documents
        parts = (".said", ".answer .judged", ".verify", ".hit")
        places = [page.locator(part).first.bounding_box()["y"] for part in parts]
        assert places == sorted(places)
    page.locator(".hit button").first.click()
    page.wait_for_selector(".two .text")
    assert {*look("document")} == {1400, 420}
    page.keyboard.press("Escape")
    page.fill("#prompt", "The capital of Kenya is")
    page.click("#beside")
    opened.wait(2)
    for width in look("compared"):
        tops = [each.bounding_box()["y"] for each in page.locator(".answer").all()]
        assert (tops[0] == tops[1]) == (width == 1400)  # side by side where there is room
    page.fill("#prompt", "a\0b".replace("\0", " ") * 400)
    page.click("#go")
    page.wait_for_selector("#error:not([hidden])")
    assert "fix:" in page.inner_text("#error") and {*look()} == {1400, 420}
    assert [told for told in opened.complaints if "422" not in told] == []
    home = server.address.url.rstrip("/")
    assert all(url.startswith((home, "blob:", "data:")) for url in opened.requests)
    opened.close()


def test_all_of_it_works_by_keyboard(browser: Any, server: Server, tmp_path: Path) -> None:
    opened = Page(browser, server.address.link())
    page = opened.page
    keys = page.keyboard
    opened.ask()
    hits = page.locator(".hit .plain")
    whole = hits.all_inner_texts()
    assert whole and "Documents that support this" in page.inner_text(".answer h3 >> nth=0")

    def tab_to(wanted: str) -> None:
        for _ in range(60):
            keys.press("Tab")
            if page.evaluate(f"document.activeElement.matches({json.dumps(wanted)})"):
                return
        raise AssertionError(f"no way to {wanted}")

    tab_to(".token")
    keys.press("ArrowRight")
    keys.press("Space")
    word = page.evaluate("document.activeElement.textContent").strip()
    assert page.evaluate("document.activeElement.getAttribute('aria-pressed')") == "true"
    assert f"Documents that support “{word}”" in page.inner_text(".answer h3 >> nth=0")
    chosen = hits.all_inner_texts()
    keys.press("Shift+ArrowRight")
    assert page.locator('.token[aria-pressed="true"]').count() == 2
    # the address says all of it: opened elsewhere, it is the same
    again = Page(browser, f"{server.address.link()}#{page.url.partition('#')[2]}")
    again.wait()
    assert again.page.locator('.token[aria-pressed="true"]').count() == 2
    assert again.page.locator(".hit .plain").all_inner_texts() == hits.all_inner_texts()
    assert again.page.input_value("#prompt") == PROMPT
    again.close()
    keys.press("Escape")
    assert hits.all_inner_texts() == whole and chosen
    tab_to(".hit .plain")
    keys.press("Enter")
    page.wait_for_selector(".two .text")
    assert page.inner_text("#reader-title") == whole[0]
    assert page.locator("#reader mark").count() > 0
    assert "of it in the highlighted part" in page.inner_text("#reader")
    keys.press("Escape")
    assert not page.locator("#reader").is_visible()
    assert page.evaluate("document.activeElement.textContent") == whole[0]  # where one was
    with page.expect_download() as saved:
        page.click("text=Save as CSV")
    table = tmp_path / "answer.csv"
    saved.value.save_as(table)
    assert "prompt,response" in table.read_text() and whole[0] in table.read_text()
    page.fill("#prompt", "The capital of Kenya is")
    page.click("#beside")
    opened.wait(2)
    assert page.locator(".answer h2").all_inner_texts() == ["Answer 1", "Answer 2"]
    two = Page(browser, f"{server.address.link()}#{page.url.partition('#')[2]}")
    two.wait(2)
    said = two.page.locator(".answer .said").all_inner_texts()
    assert said == page.locator(".answer .said").all_inner_texts()
    assert opened.complaints == two.complaints == []
    two.close()
    opened.close()


def test_the_passages_that_carry_the_influence_come_after_the_answer(browser: Any, server: Server) -> None:
    opened = Page(browser, server.address.link())
    page = opened.page
    held: list[Any] = []
    asked: dict[str, Any] = {}

    def in_nats(route: Any) -> None:
        asked.update(route.fetch().json(), unit="nats", scale={"band": None})
        for each in asked["hits"]:
            each |= {"low": each["influence"] / 7, "high": 2.3 * each["influence"]}
        route.fulfill(json=asked)

    page.route("**/query", in_nats)
    page.route("**/passages", lambda route: held.append(route))
    page.keyboard.type(PROMPT)
    page.keyboard.press("Enter")
    page.wait_for_selector(".hit .passage.faint")
    first = page.locator(".hit .passage").all_text_contents()
    (waiting,) = held
    waiting.continue_()
    opened.wait()
    assert page.locator(".hit .passage.faint").count() == 0
    home, bearer = server.address.url.rstrip("/"), {"Authorization": f"Bearer {server.address.token}"}
    found = page.request.post(f"{home}/passages", headers=bearer, data={"prompt": PROMPT}).json()
    hit, told = asked["hits"][0], page.locator(".hit").first.inner_text()
    assert hit["above_line"] and influence_text(hit, "nats") in told  # as everywhere
    assert page.locator(".bar").count() == sum(each["above_line"] for each in asked["hits"])
    shown = page.locator(".hit .passage").all_text_contents()
    assert shown == [each["passage"] for each in found["passages"]] and shown != first
    page.locator(".token").first.press("Space")  # of words, whose numbers are not in nats
    told = page.locator(".hit").first.inner_text()
    assert "influence +" in told and "nats" not in told
    assert "on these words" in (page.locator(".hit .share").first.get_attribute("title") or "")
    assert opened.complaints == []
    opened.close()


def test_documents_that_the_model_was_never_trained_on_are_marked(browser: Any, grown: Path) -> None:
    with serving(grown) as listening:
        opened = Page(browser, listening.address.link())
        page = opened.page
        page.fill("#top", "61")
        page.focus("#prompt")
        opened.ask()
        marked = page.locator(".hit", has_text="the model was never trained on it").locator(".plain")
        assert marked.all_text_contents() == ["new"] and page.locator(".hit").count() > 9
        assert "never trained on 1 document of this index" in page.inner_text(".answer")
        page.locator(".token").first.press("Space")  # influences on one word
        assert "Documents that support “" in page.inner_text(".answer h3 >> nth=0")
        assert marked.all_text_contents() == ["new"] and opened.complaints == []
        opened.close()


def _picture(page: Any, name: str) -> None:
    """Kept for who wants to look, where STRIDE_TEST_PICTURES says."""
    if folder := os.environ.get("STRIDE_TEST_PICTURES"):
        page.screenshot(path=f"{folder}/{name}.png", full_page=True)
