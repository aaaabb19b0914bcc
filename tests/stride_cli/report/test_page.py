"""The page of a report: well formed, self-contained, escaped, everything in it."""

from __future__ import annotations

import re
from html.parser import HTMLParser

from stride_cli.report.contents import from_record
from stride_cli.report.drawing import provenance
from stride_cli.report.page import render_report
from stride_cli.version import __version__

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
        self.classes: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs) -> None:
        self.tags.append(tag)
        if re.fullmatch(r"h[1-6]", tag):
            self.headings.append(int(tag[1]))
        self.attributes += [(name, value or "") for name, value in attrs]
        self.classes += [value or "" for name, value in attrs if name == "class"]
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
    about = [("model", "a <model>"), *provenance(None, ["stride", "report", "a prompt"])]
    text = render_report(answers, title="a <title>", about=about)
    page = Page(text)
    for number in range(5):
        assert page.text.count(f"prompt {number}") == 2 and f"id-{number}: " in page.text
    told = ("a <title>", "d0", "40%", "a <model>", f"by stride {__version__}", "stride report 'a prompt'")
    for part in (*told, "62% of it", "R²", "relative 1e-07", "unfold all"):
        assert part in page.text, part
    assert '<span class="token"> Paris</span><span class="token"> &amp; &lt;b&gt;</span>nothing' in text
    assert page.tags.count("svg") == 5 and page.tags.count("article") == 5
    links = [value for name, value in page.attributes if name in ("href", "src", "action", "data", "srcset")]
    assert all(link.startswith("#q") or link == "data:," for link in links)
    assert "url(" not in text and "@import" not in text and "prefers-color-scheme: dark" in text
    assert not any(name.startswith("on") for name, _ in page.attributes)


def test_verdicts_stand_first_and_what_is_below_the_line_is_folded_and_grey(shown) -> None:
    plain = Page(render_report([shown(), shown()], title="x"))
    assert "closest" not in plain.text and "probability 0.78 a token" in plain.text
    assert plain.classes.count("bar supports") == 4 and plain.classes.count("bar opposes") == 2
    for word, named in (("clear", 2), ("weak", 0), ("guessing", 0)):
        judged = shown(verdict=word, judged={"line": 0.5, "beyond": 0.09, "surer": 0.01, "nulls": 100})
        hits = [{**hit, "above_line": named > 0 and hit["share"] > 0.3} for hit in judged.record["hits"]]
        page = Page(render_report([from_record({**judged.record, "hits": hits})] * 2, title="x"))
        assert page.classes.count(f"verdict {word}") == 4  # overview and card
        assert page.classes.count("bar supports") == named
        assert page.classes.count("bar opposes") == 2 * (word != "guessing")
        assert page.text.count("5%") == 0 and ("No source found" in page.text) == (word == "guessing")
        places = [page.text.index(part) for part in (f"{word.capitalize()}: ", "Closest, ")]
        assert places == sorted(places) and page.classes.count("quiet") == 2 * (1 + (word == "guessing"))


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
    saved = render_report([from_record(answer.record)], title="x")
    assert "Highlighted</mark> is the sentence of that chunk that carries its influence, where" in saved
