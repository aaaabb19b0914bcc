"""The page of a comparison: well formed, self-contained, everything in it."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from stride_cli.research.evaluation.compare import Entry, Ground, compare_methods
from stride_cli.research.evaluation.distribution import DistributionCounter
from stride_cli.research.evaluation.metrics import predicted_response
from stride_cli.research.evaluation.scoring import Run
from stride_cli.research.pages.comparison_page import write_page

VOID = {"meta", "link", "line", "circle", "path", "br"}


class Balance(HTMLParser):
    """Every element that is opened is closed, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs) -> None:
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag


@pytest.fixture(scope="module")
def comparison() -> tuple[list[Entry], Ground]:
    generator = np.random.default_rng(0)
    masks, influence = generator.random((20, 50)) < 0.5, generator.normal(size=(4, 50))
    losses = -predicted_response(influence, masks).T[:, None] + generator.normal(size=(20, 2, 4))
    ground = Ground.of(losses, None, alpha=0.5)

    def run(spec: str) -> Run:
        if spec == "gone":
            raise RuntimeError("no <such> thing")
        scores = influence if spec == "stride" else generator.normal(size=influence.shape)
        spread = DistributionCounter().add(scores).result()
        return Run(predicted_response(scores, masks), spread, 2.0, 0.1, 12, 3e6)

    specs = ["stride", "a<b:c=1", "gone", *(f"method-{number}" for number in range(9))]
    return list(compare_methods(specs, ground, run, draws=100)), ground


def test_page_is_well_formed_and_holds_everything(comparison, tmp_path: Path) -> None:
    entries, ground = comparison
    write_page(tmp_path / "page.html", entries, ground, index_name="run.stride")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert not re.search(r"https?://|<script", text) and "prefers-color-scheme: dark" in text
    balance = Balance()
    balance.feed(text)
    assert balance.open == []
    assert text.count("<svg") == 2 and "nan" not in text.lower().replace("font", "")
    for part in ("run.stride", "a&lt;b:c=1", "no &lt;such&gt; thing", "noise ceiling", "method-8"):
        assert part in text, part
    assert "<b>stride</b> has the highest LDS" in text
    assert "20 retrained subsets are few (expected 30 or more)" in text
    assert text.count('class="wide plot" role="region"') == 3  # the table and the plots scroll on a phone
    assert f"{entries[0].estimates['spearman'].mean:.3f}" in text
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]
