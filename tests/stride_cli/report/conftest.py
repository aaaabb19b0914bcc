"""Answers made by hand, and a real browser to look at their page."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stride_cli.report.contents import Responses, ShownAnswer, concentration, from_record


def make_hit(rank: float, document: str, share: float, **changes: Any) -> dict[str, Any]:
    """A hit's record; a negative share opposes."""
    hit = {
        "rank": rank,
        "document": document,
        "influence": 2.0 * share,
        "share": abs(share),
        "sign": "supports" if share >= 0 else "opposes",
        "chunk": 17,
        "passage": "Paris is the capital of France. <script>alert(1)</script>",
        "seen": True,
        "neighbours": 0,
        "backfilled": share == 0,
    }
    return hit | changes


def make_record(shares: list[float] | None = None, **changes: Any) -> dict[str, Any]:
    """An answer's record with documents d0, d1, … of these shares; dotted keys change nested values."""
    shares = [0.4, 0.05, -0.03] if shares is None else shares
    hits = [make_hit(place + 1, f"d{place}", share) for place, share in enumerate(shares)]
    record: dict[str, Any] = {
        "schema": "stride.answer/1",
        "prompt": "The capital of France is",
        "response": " Paris & <b>nothing</b> else",
        "generated": True,
        "scored_tokens": 5,
        "loss": 0.25,
        "hits": [hit for hit in hits if hit["sign"] == "supports"],
        "opposers": [hit for hit in hits if hit["sign"] == "opposes"],
        "recovery": {
            "lambda": 0.01,
            "lambda_ratio": 0.03,
            "nonzeros": 60,
            "duality_gap": 1e-9,
            "relative_gap": 1e-7,
            "r_squared": 0.93,
            "passes": 2,
        },
        "measurement": {"method": "linear", "subsets": 400, "agreement": None, "coverage": 1.0},
        "seconds": {"generate": 0.1, "measure": 0.1, "recover": 0.1, "rank": 0.1},
    }
    for key, value in changes.items():
        group, _, name = key.rpartition("__")
        (record[group] if group else record)[name] = value
    return record


def make_shown(**changes: Any) -> ShownAnswer:
    """An answer with everything that a live one has."""
    from dataclasses import replace

    shown = from_record(make_record(**changes))
    generator = np.random.default_rng(0)
    measured = generator.normal(size=50) * 1e-3
    long = "One. Two. " * 60 + "Paris is the capital of France. " + "Three. Four. " * 60
    at = long.index("Paris")
    first = replace(shown.supporters[0], text=long, span=(at, at + 31), held=0.62, whole=True)
    return replace(
        shown,
        pieces=((" Paris", True), (" & <b>", True), ("nothing</b> else", False)),
        supporters=(first, *shown.supporters[1:]),
        responses=Responses(measured, 0.9 * measured),
        concentration=concentration(generator.normal(size=60), 1000),
    )


@pytest.fixture(scope="session")
def record() -> Callable[..., dict[str, Any]]:
    return make_record


@pytest.fixture(scope="session")
def shown() -> Callable[..., ShownAnswer]:
    return make_shown


class Browser:
    """Headless Chromium, spoken to over a pipe in its DevTools protocol."""

    def __init__(self, program: str, profile: Path) -> None:
        ours_in, theirs_out = os.pipe()
        theirs_in, ours_out = os.pipe()
        command = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}'
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"]
        self.process = subprocess.Popen(
            ["bash", "-c", command, "bash", program, *flags, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._answers, self._orders = os.fdopen(ours_in, "rb"), os.fdopen(ours_out, "wb")
        self._number, self._rest, self.session = 0, b"", None
        self.troubles: list[str] = []
        self.requests: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        order = {"id": self._number, "method": method, "params": parameters}
        if self.session:
            order["sessionId"] = self.session
        self._orders.write(json.dumps(order).encode() + b"\0")
        self._orders.flush()
        while True:
            message = self._next()
            if message.get("id") == self._number:
                assert "error" not in message, message["error"]
                return message["result"]

    def open(self, page: Path, fragment: str = "") -> None:
        """Load a page and wait for it; what it complains about and asks for is kept."""
        self.troubles.clear()
        self.requests.clear()
        self.call("Page.navigate", url=page.resolve().as_uri() + fragment)
        while self.value("document.readyState + location.protocol") != "completefile:":
            pass

    def value(self, expression: str) -> Any:
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def close(self) -> None:
        self.session = None
        self.call("Browser.close")
        self.process.wait(10)
        self._orders.close()
        self._answers.close()

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            piece = self._answers.read1(1 << 16)
            assert piece, "the browser went away"
            self._rest += piece
        line, _, self._rest = self._rest.partition(b"\0")
        message = json.loads(line)
        if message.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled"):
            self.troubles.append(json.dumps(message["params"]))
        if message.get("method") == "Network.requestWillBeSent":
            self.requests.append(message["params"]["request"]["url"])
        return message


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    program = next((found for found in map(shutil.which, names) if found), None)
    if program is None:
        pytest.skip("no Chromium on this machine")
    started = Browser(program, tmp_path_factory.mktemp("profile"))
    yield started
    started.close()
