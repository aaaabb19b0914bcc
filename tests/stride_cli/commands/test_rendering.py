"""Answers on terminals of several widths."""

from __future__ import annotations

import csv
import io
import re
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
from rich.console import Console

from stride_cli.api import Answer
from stride_cli.attribution.answer import MeasurementRecord
from stride_cli.attribution.frames import html_table
from stride_cli.attribution.nats import Nats
from stride_cli.attribution.verdict import Verdict, Word
from stride_cli.commands.rendering import render_answer
from stride_cli.commands.verify_hit import render_check
from stride_cli.data.queries import Query
from stride_cli.prove.hit_record import _top_documents
from stride_cli.recovery.lasso import Solution
from stride_cli.recovery.ranking import Hit
from stride_cli.report.answers import CsvTable
from stride_cli.report.contents import from_record
from stride_cli.report.drawing import verdict_style
from stride_cli.report.page import render_report
from stride_cli.schema.answer_records import VERDICTS
from stride_cli.serve.app import _page

PASSAGE = (
    "The French Revolution began in 1789, when the Estates-General met at Versailles and the people of Paris "
    "stormed the Bastille, a royal fortress and prison."
)


def hit(rank: float, influence: float, **changes) -> Hit:
    number, sign = (int(rank), "supports") if influence >= 0 else (9, "opposes")
    values = {"rank": rank, "document": number, "influence": influence, "share": abs(influence) / 2}
    values |= {"sign": sign, "chunk": number, "backfilled": influence == 0, "neighbours": 0, "seen": True}
    return Hit(**{**values, **changes})


def answer(passage: str = PASSAGE, opposers: bool = True) -> Answer:
    numbers = (0.0, 0.01, 0.3, 0.03, 1e-9, 1e-7, 2, 9, 0.9)
    solution = Solution(np.arange(3), np.array([0.8, 0.2, -0.1]), *numbers, np.zeros(300), 50, moved=3)
    hits = [hit(1, 0.8), hit(2, 0.2, neighbours=1), hit(3, 0.0, seen=False)]
    return Answer(
        query=Query("The Revolution began in", " 1789", np.arange(6), np.array([0, 0, 0, 0, 0, 1.0]), True),
        loss=0.5,
        supporters=hits,
        opposers=[hit(1, -0.1)] if opposers else [],
        passages={1: passage, 2: "Short.", 3: "Other.", 9: "Against it."},
        solution=solution,
        measurement=MeasurementRecord("linear", 300, 1.0, 1),
        seconds={"measure": 0.1},
        document_ids={1: "history/one", 2: "history/two", 3: "history/three", 9: "history/against"},
        titles={1: "", 2: "Two Towns"},
    )


def shown(width: int, found: Answer | None = None, *, colour: bool = False, **options) -> str:
    written = io.StringIO()
    system = "standard" if colour else None
    console = Console(width=width, file=written, force_terminal=colour, color_system=system)
    render_answer(found or answer(), console=console, **options)
    return written.getvalue()


def together(width: int, found: Answer | None = None, **options) -> str:
    return " ".join(shown(width, found, **options).split())


@pytest.mark.parametrize("width", [60, 100, 160])
def test_everything_is_there_and_fits(width: int) -> None:
    text = shown(width)
    assert max(len(line) for line in text.splitlines()) <= width
    for part in ("documents that support this", "documents that oppose this", "history/three"):
        assert part in text
    told = together(width)
    assert "a number to compare within one answer; recovered from 300 subsets" in told
    assert "nats" not in told and "1 scored token, probability 0.61" in told
    assert "R²" not in told  # it is the Lasso's, whose weights are not what is shown
    in_full = together(width, verbose=True)
    assert "λ = 0.03 λ_max, 3 of 50 chunks moved by" in in_full
    assert "relative duality gap 1.0e-07, R² 0.900" in in_full
    assert "40% +0.800 history/one" in told and "Two Towns history/two 1 indistinguishable" in told
    assert "████░░░░░░  40%" in text and "█░░░░░░░░░  10%" in text and "░░░░░░░░░░   5%" in text
    assert "░░░░░░░░░░   –" in text
    assert "3 of 5 asked" not in told and "3 of 5 asked: no" in together(width, replace(answer(), asked=5))
    assert width >= 140 or PASSAGE in told


def judged(word: str, line: float = 0.5) -> Answer:
    return replace(answer(), verdict=Verdict(word, line, 0.09, 0.01, 0.02, 100), line=line)


@pytest.mark.parametrize("word", ["clear", "weak", "guessing"])
def test_the_verdict_stands_first_and_colours_and_numbers_above_the_line_alone(word: str) -> None:
    found = judged(word)
    if word == "weak":  # nothing is above it
        found = replace(found, line=0.9)
    lines = shown(120, found).splitlines()
    assert lines[1].startswith(word.capitalize()) and ("no source found" in lines) == (word == "guessing")
    parts = ["history/one", "closest, ", "history/two", "history/three", "opposing, ", "history/against"]
    if word != "clear":
        parts[:2] = parts[1::-1]
    places = [next(number for number, line in enumerate(lines) if part in line) for part in parts]
    assert places == sorted(places)
    low = [line for line in lines if re.search("history/[ta]", line)]
    assert len(low) == 3 and not any("█" in line or "%" in line for line in low)
    assert ("that oppose this" in shown(120, judged(word, 0.05))) == (word != "guessing")
    coloured = shown(120, found, colour=True)
    assert ("\x1b[32m" in coloured) == (word == "clear") and "\x1b[35m" not in coloured
    assert "closest" not in shown(160)  # not calibrated: there is no line
    for pages in (verdict_style(), _page("page.css", "text/css").body.decode()):  # light, and dark
        assert pages.count(f".{word} {{ --verdict: {VERDICTS[word].light}") == 1
        assert pages.count(f".{word} {{ --verdict: {VERDICTS[word].dark}") == 1
    assert set(VERDICTS) == set(get_args(Word))


def test_both_documents_of_a_contested_answer_stand_above_the_line() -> None:
    found = judged("contested")
    both = replace(found, verdict=replace(found.verdict, against="history/two"))
    assert [hit["above_line"] for hit in both.to_record()["hits"]] == [True, True, False]
    before, _, behind = shown(120, both).partition("closest, ")
    assert "history/two" in before and "history/three" in behind and "history/two" not in behind


@pytest.mark.parametrize("scale", [None, Nats(3.2e-3, None, None, 1e-4, 0.9, 4, 90)])
def test_one_answer_has_the_same_numbers_everywhere(scale: Nats | None, capsys, monkeypatch) -> None:
    """Terminal, report, notebook, CSV, frame, and the table of verify-hit, beside the record."""
    pytest.importorskip("pandas")
    monkeypatch.setenv("COLUMNS", "120")
    found = replace(judged("clear", 0.15), scale=scale)
    record, unit = found.to_record(), " nats" * (scale is not None)
    one, two = record["hits"][:2]
    assert one["influence"] == pytest.approx(0.8 if scale is None else 0.8 * 3.2e-3)
    pages = {"terminal": shown(120, found)}
    pages["report"] = render_report([from_record(record)], title="x")
    pages["notebook"] = html_table(record)
    removed, influences = _top_documents(found, 2)
    documents = [
        {"document": found.document_ids[number], "influence": influence, "tokens": 9}
        for number, influence in zip(removed.tolist(), influences, strict=True)
    ]
    query = {"prompt": "", "response": ""}
    render_check({**query, "documents": documents, "runs": [], "unit": found.unit, "sentence": ""})
    pages["verify-hit"] = capsys.readouterr().out
    for hit in (one, two):
        for name, text in pages.items():
            plain = re.sub(r"<[^>]*>", " ", text)
            numbers = re.findall(rf"([+-][\d.]+(?:e-\d+)?){unit} ", plain)
            assert sum(float(each) == pytest.approx(hit["influence"], rel=5e-3) for each in numbers) == 1, (
                name
            )
    written = io.StringIO()
    CsvTable(written).add(record)
    rows = list(csv.DictReader(io.StringIO(written.getvalue())))
    frame = found.to_frame()
    for place, hit in enumerate([*record["hits"], *record["opposers"]]):
        assert float(rows[place]["influence"]) == frame["influence"][place] == hit["influence"]


NASTY = "a\x1b]0;owned\x07\x9b2J\u202egnp [red]x[/red] [/] {unit}"
HARMLESS = r"a\x1b]0;owned\x07\x9b2J\u202egnp [red]x[/red] [/] {unit}"


def test_what_documents_are_called_steers_no_terminal() -> None:
    plain = answer()
    found = replace(
        plain,
        document_ids={number: f"{name}\n{NASTY}" for number, name in plain.document_ids.items()},
        query=replace(plain.query, prompt=NASTY, response=NASTY),
        passages=dict.fromkeys(plain.passages, NASTY),
    )
    text = shown(400, found, verbose=True)
    assert not set(text) & set("\x1b\x07\x9b\u202e")
    assert f"history/one\\n{HARMLESS}" in text and HARMLESS + HARMLESS in text


def test_tables_notes_and_progress_show_data_as_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    from stride_cli import output
    from stride_cli.commands.tables import print_table, show_record

    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(output, "wants_json", lambda flag: flag)
    print_table(NASTY, [NASTY, "n"], [[NASTY, NASTY]])
    show_record({"path": NASTY}, False, title=NASTY)
    output.note(NASTY)
    monkeypatch.delenv("STRIDE_NO_PROGRESS", raising=False)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with output.progress(NASTY, 2, unit=NASTY) as bar:
        bar.describe(NASTY)
    told = capsys.readouterr()
    assert told.out.count(HARMLESS) == 4 + 2 and HARMLESS in told.err
    assert not set(told.out) & set("\x1b\x07\x9b\u202e")
    assert not set(told.err) & set("\x07\x9b\u202e") and "\x1b]" not in told.err
