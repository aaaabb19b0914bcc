"""The machine's Chromium, driven by playwright: pages, and what they complain of."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Start it; nothing is downloaded."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    found = os.environ.get("STRIDE_TEST_BROWSER") or next(filter(None, map(shutil.which, _NAMES)), None)
    if found is None:
        pytest.skip("there is no Chromium on this machine (apt-get install chromium, or STRIDE_TEST_BROWSER)")
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=found, args=["--no-sandbox", "--disable-gpu"])
        yield opened
        opened.close()


class Page:
    """A page that is opened at a URL, what it complains of and what it asks for."""

    def __init__(self, browser: Any, url: str, *, width: int = 1400, scheme: str = "light") -> None:
        self.context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme, accept_downloads=True
        )
        self.page = self.context.new_page()
        self.page.set_default_timeout(60_000)
        self.complaints: list[str] = []
        self.page.on(
            "console", lambda told: self.complaints.append(told.text) if told.type == "error" else None
        )
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.requests: list[str] = []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(url)

    def fits(self) -> bool:
        """Whether nothing is wider than the window."""
        return bool(self.page.evaluate("document.documentElement.scrollWidth <= innerWidth"))

    def close(self) -> None:
        self.context.close()
