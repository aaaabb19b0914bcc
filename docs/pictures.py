"""Take the pictures of the docs: python docs/pictures.py [WORK], with the extras serve and dev, and Chromium.

WORK (default: stride-demo) holds the demo, as `stride demo` leaves it, and a smaller model that is trained
again for the pictures of proofs and comparisons. What is there is used; the first time takes some minutes.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright

from stride_cli.api import WorkspacePath
from stride_cli.serve.options import ServeOptions
from stride_cli.serve.running import Server

PICTURES = Path(__file__).parent / "pictures"
ASKED = "The French Revolution began in"


def stride(line: str, *, within: Path, out: str | None = None) -> None:
    """Run a command in a directory; what it writes goes to a file there, and is kept where it is there."""
    if out is None or not (within / out).exists():
        with (within / out if out else Path(os.devnull)).open("w", encoding="utf-8") as stdout:
            words = [sys.executable, "-m", "stride_cli", *shlex.split(line)]
            subprocess.run(words, check=True, stdout=stdout, cwd=within)


def prepare(work: Path) -> None:
    """Make the indexes and pages that are shown, where they are missing."""
    if not (work / "demo.stride").exists():
        stride(f"demo --out {work.name}", within=work.parent)
    small = work / "small"
    small.mkdir(exist_ok=True)
    lines = (work / "corpus.jsonl").read_text(encoding="utf-8").splitlines()
    history = [line for line in lines if '"id": "history/' in line]
    chosen = history[:40] + [line for line in history[40:] if "history/french-revolution" in line]
    invented = [
        {"id": f"new/{n}", "text": f"The {what} of the northern {where} closed in {1950 + n} after a storm."}
        for n, (what, where) in enumerate(
            [("library", "town"), ("bakery", "suburb"), ("mill", "valley")] * 10
        )
    ]
    asked = [*chosen[:8], *map(json.dumps, invented)]
    for name, written in (("corpus", chosen), ("queries", chosen[:12]), ("benchmark", asked)):
        (small / f"{name}.jsonl").write_text("\n".join(written) + "\n", encoding="utf-8")
    if not (small / "run.stride").exists():
        size = "--epochs 20 --layers 1 --width 64 --vocab 768"
        stride(f"model train corpus.jsonl --out model {size}", within=small)
        stride("index build corpus.jsonl --model model --out run.stride", within=small)
        stride("train --index run.stride", within=small)
        stride("evaluate truth --index run.stride --queries queries.jsonl --subsets 32", within=small)
    compared = "evaluate compare --index run.stride --methods stride,pairs,tfidf,graddot,chance"
    stride(f"{compared} --html compare.html", within=small, out="compare.jsonl")
    stride("audit benchmark.jsonl --index ../demo.stride --format html", within=small, out="audit.html")
    prompts = f'"{ASKED}" "The best pizza in town is" "The capital of Kenya is"'
    stride(f"report {prompts} --index ../demo.stride", within=small)


@contextmanager
def served(index: Path) -> Iterator[Server]:
    """Serve an index meanwhile."""
    server = Server([WorkspacePath(index)], ServeOptions(port=0))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join()


class Camera:
    """A browser that keeps what it shows as small PNG files."""

    def __init__(self, browser: Any) -> None:
        self._browser = browser

    def open(self, url: str, *, width: int = 1100, scheme: str = "light") -> Any:
        page = self._browser.new_context(
            viewport={"width": width, "height": 720}, color_scheme=scheme
        ).new_page()
        page.set_default_timeout(600_000)
        page.goto(url)
        return page

    def ask(self, page: Any, prompt: str, count: int = 1) -> None:
        page.wait_for_selector("#index option", state="attached")
        page.fill("#prompt", prompt)
        page.click("#go" if count == 1 else "#beside")
        page.wait_for_selector(f'#answers[aria-busy="false"] .answer:nth-child({count}) .token')

    def take(self, page: Any, name: str, *, whole: bool = True) -> None:
        page.evaluate("document.activeElement.blur()")
        if page.locator("#status").count():  # how long an answer took, or models take, is this machine's
            page.evaluate("document.getElementById('status').textContent = ''")
            page.evaluate(
                "document.querySelectorAll('.verify .buttons .faint').forEach(each => "
                "{ each.textContent = each.textContent.replace(/, about .*/, ''); })"
            )
        picture = Image.open(BytesIO(page.screenshot(full_page=whole)))
        picture.convert("P", palette=Image.Palette.ADAPTIVE, colors=200).save(
            PICTURES / f"{name}.png", optimize=True
        )


def main(work: Path) -> None:
    prepare(work)
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    found = os.environ.get("STRIDE_TEST_BROWSER") or next(filter(None, map(shutil.which, names)))
    with (
        sync_playwright() as driver,
        served(work / "demo.stride") as demo,
        served(work / "small/run.stride") as small,
    ):
        browser = driver.chromium.launch(executable_path=found, args=["--no-sandbox", "--disable-gpu"])
        camera = Camera(browser)
        page = camera.open(demo.address.link())
        page.wait_for_selector("#questions button")
        camera.take(page, "serve-empty")
        camera.ask(page, ASKED)
        camera.take(page, "serve")
        page.locator(".token[data-source]").first.click()
        camera.take(page, "serve-word")
        page.locator(".hit button").first.click()
        page.wait_for_selector(".two .text")
        camera.take(page, "serve-document", whole=False)
        page.keyboard.press("Escape")
        camera.ask(page, "The capital of Kenya is", 2)
        camera.take(page, "serve-beside")
        camera.ask(page, "The best pizza in town is")
        camera.take(page, "serve-guess")
        phone = camera.open(demo.address.link(), width=420, scheme="dark")
        camera.ask(phone, ASKED)
        camera.take(phone, "serve-phone")
        page = camera.open(small.address.link())
        page.click("#options summary")
        page.fill("#response", "1789, when the Estates-General met at Versailles")
        camera.ask(page, ASKED)
        page.click("#options summary")
        page.evaluate("document.querySelectorAll('.answer details').forEach(each => { each.open = true; })")
        for field, value in zip(page.locator(".verify input").all(), ("4", "2"), strict=True):
            field.fill(value)
        page.click(".verify button")
        page.wait_for_selector(".verify svg")
        page.evaluate(
            "document.querySelectorAll('.verify details, .quiet').forEach(each => { each.open = false; })"
        )
        camera.take(page, "serve-verified")
        for name in ("report", "audit", "compare"):
            camera.take(
                camera.open((work / "small" / f"{name}.html").absolute().as_uri()),
                name,
                whole=name == "compare",
            )
        camera.take(
            camera.open((work / "small/compare.html").absolute().as_uri(), width=420), "compare-phone"
        )


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "stride-demo").absolute())
