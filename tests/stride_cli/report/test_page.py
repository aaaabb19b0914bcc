"""The page of a report: well formed, self-contained, escaped, everything in it."""

from __future__ import annotations

import itertools
import re
from html.parser import HTMLParser

import numpy as np
import pytest

from stride_cli.report.contents import Concentration, Responses, from_record
from stride_cli.report.page import render_report
from stride_cli.report.plots import concentration_plot, response_plot

VOID = {"meta", "link", "input", "br", "line", "path", "circle"}


class Page(HTMLParser):
    """Elements in balance, their attributes, and the text outside style and script."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.headings: list[int] = []
        self.attributes: list[tuple[str, str]] = []
        self.marked: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs) -> None:
        self.tags.append(tag)
        if re.fullmatch(r"h[1-6]", tag):
            self.headings.append(int(tag[1]))
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag == "mark":
            self.marked.append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "mark" in self.open:
            self.marked[-1] += data
        if not {"style", "script"} & set(self.open):
            self.text += data


def test_everything_is_on_the_page_and_nothing_is_elsewhere(shown) -> None:
    answers = [shown(prompt=f"prompt {number}", id=f"id-{number}") for number in range(5)]
    text = render_report(answers, title="a <title>")
    page = Page(text)
    for number in range(5):
        assert page.text.count(f"prompt {number}") == 2 and f"id-{number}: " in page.text
    for part in (
        "a <title>",
        "d0",
        "40% of all influence",
        "62% of it",
        "R²",
        "relative 1e-07",
        "unfold all",
    ):
        assert part in page.text, part
    assert '<span class="token"> Paris</span><span class="token"> &amp; &lt;b&gt;</span>nothing' in text
    assert page.tags.count("svg") == 10 and page.tags.count("article") == 5
    links = [value for name, value in page.attributes if name in ("href", "src", "action", "data", "srcset")]
    assert all(link.startswith("#q") or link == "data:," for link in links)
    assert "url(" not in text and "@import" not in text and "prefers-color-scheme: dark" in text
    assert not any(name.startswith("on") for name, _ in page.attributes)


def test_verdicts_stand_first_and_a_line_parts_the_hits(shown) -> None:
    plain = Page(render_report([shown(), shown()], title="x")).text
    assert "verdict" not in plain and "no stronger than" not in plain and "probability 0.78 a token" in plain
    judged = shown(verdict="clear", judged={"line": 0.5, "beyond": 0.09})
    hits = [{**hit, "above_line": hit["influence"] > 0.5} for hit in judged.record["hits"]]
    page = Page(render_report([from_record({**judged.record, "hits": hits})] * 2, title="x"))
    assert page.text.count("clear") == 4 and page.text.count("Clear: ") == 2  # overview, folded and unfolded
    parts = ("Clear: ", "40% of all influence", "below: no stronger", " 5% of all influence")
    places = [page.text.replace("d1", " ").index(part) for part in parts]
    assert places == sorted(places) and page.text.count("below: no stronger") == 2


def test_the_overview_says_what_the_model_said_and_the_verdict(shown) -> None:
    answers = [shown(verdict=word, response=f" {word} said") for word in ("clear", "weak")]
    text = render_report(answers, title="x")
    page = Page(text)
    overview = page.text.partition("Overview")[2].partition("Documents that support")[0]
    assert overview.index("clear said") < overview.index("weak said")
    assert [tag for tag in page.tags if tag == "th"] == ["th"] * 5
    assert text.index('class="verdict weak"') < text.index("<article")
    # no level is left out, and every answer has a heading
    assert page.headings[:2] == [1, 2] and page.headings.count(1) == 1 and page.headings.count(2) == 1 + 2
    assert all(later <= earlier + 1 for earlier, later in itertools.pairwise(page.headings))
    assert (
        "anywhere" not in text.partition("body {")[2].partition("}")[0]
    )  # words break where nothing else fits


def test_nats_are_said_to_add_up_only_where_they_do(shown) -> None:
    scale = {"link": "ceiling", "slope": None, "ceiling": 8.0, "half": 0.3, "error": 0.8}
    bounded = render_report([shown(unit="nats", scale=scale)], title="x")
    straight = render_report([shown(unit="nats", scale={"link": "linear", "slope": 2.0})], title="x")
    assert "trained without the document alone; of several, shares add up and nats do not." in bounded
    assert "trained without the document." in straight and "nats do not" not in straight


def test_documents_cannot_write_html(shown) -> None:
    nasty = "</mark></p><script>alert(1)</script><img src=x onerror=alert(1)>\x1b[2J\x00 “quotes” & \ud800"
    answer = shown(prompt=nasty, response=nasty, id=nasty)
    answer.record["hits"][0].update(document=nasty, passage=nasty)
    saved = from_record(answer.record)
    page = Page(render_report([saved, saved], title=nasty))
    assert page.tags.count("script") == 1 and "img" not in page.tags
    assert "<script>alert(1)</script>" in page.text
    assert "\x1b" not in page.text and "\x00" not in page.text and "\\x1b[2J" in page.text


def test_the_highlighted_passage_is_in_the_chunk_with_its_words(shown) -> None:
    answer = shown()
    text = render_report([answer], title="x")
    legend, first, *_ = Page(text).marked
    hit = answer.supporters[0]
    assert legend == "Highlighted"
    assert first == hit.text[slice(*hit.span)] == "Paris is the capital of France."
    assert "<u>capital</u>" in text and "<u>Paris</u>" in text and "<u>France</u>" in text
    assert hit.text in Page(text).text  # the whole chunk, folded
    assert Page(text).tags.count("mark") == 1 + 2 + 2  # legend; passage and whole chunk; two saved passages


def test_a_saved_answer_lacks_plots_and_scored_tokens(record) -> None:
    text = render_report([from_record(record())], title="x")
    assert "<svg" not in text and 'class="token"' not in text
    assert "Certificate" in text and "sentence of a chunk most like the query" in text
    assert "<mark><u>Paris</u> is the <u>capital</u> of <u>France</u>. &lt;script" in text


def test_rows_of_a_classifier_have_labels_and_no_passages(record) -> None:
    answer = record(prompt="row 3 → ", response="3")
    for hit in (*answer["hits"], *answer["opposers"]):
        hit.update(label="3", passage="label 3")
    text = render_report([from_record(answer)], title="x")
    assert "<mark>" not in text and "<u>" not in text and '<p class="text">label 3</p>' in text


def test_an_answer_without_hits_has_a_page(record) -> None:
    empty = record([], recovery__nonzeros=0, loss=None, recovery__r_squared=None)
    page = Page(render_report([from_record(empty)] * 2, title="x"))
    assert "no document moved this response" in page.text and "–" in page.text


def test_marks_stay_on_the_paper(shown) -> None:
    answer = shown()
    small = Responses(np.full(3, 1e-30), np.zeros(3))
    one = Concentration(np.array([1]), np.array([1.0]), 10)
    plots = [response_plot(answer.responses), concentration_plot(answer.concentration)]
    for svg in (*plots, response_plot(small), concentration_plot(one)):
        width, height = map(float, re.search(r'viewBox="0 0 (\S+) (\S+)"', svg).groups())
        places = [*re.findall(r"(?:M|L)([-\d.]+) ([-\d.]+)", svg), *re.findall(r'x="(\S+)" y="(\S+)"', svg)]
        places += re.findall(r'cx="(\S+)" cy="(\S+)"', svg)
        assert len(places) > 3 and "nan" not in svg
        assert all(0 <= float(x) <= width and 0 <= float(y) <= height for x, y in places)


def test_a_point_of_the_response_plot_is_where_it_should_be() -> None:
    svg = response_plot(Responses(np.array([0.0, 2.0, 4.0]), np.array([0.0, 1.0, 4.0])))
    points = np.array(re.findall(r"M([-\d.]+) ([-\d.]+)h0", svg), dtype=float)
    assert points[:, 0] == pytest.approx(
        points[0, 0] + np.array([0, 0.25, 1]) * np.ptp(points[:, 0]), abs=0.2
    )
    assert points[:, 1] == pytest.approx(points[0, 1] - np.array([0, 0.5, 1]) * np.ptp(points[:, 1]), abs=0.2)
