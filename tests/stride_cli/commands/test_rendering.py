"""Answers on terminals of several widths."""

from __future__ import annotations

import io
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from stride_cli.api import Answer
from stride_cli.attribution.answer import MeasurementRecord
from stride_cli.attribution.verdict import Verdict
from stride_cli.commands.rendering import render_answer
from stride_cli.data.queries import Query
from stride_cli.recovery.lasso import Solution
from stride_cli.recovery.ranking import Hit

PASSAGE = (
    "The French Revolution began in 1789, when the Estates-General met at Versailles and the people of Paris "
    "stormed the Bastille, a royal fortress and prison."
)


def hit(rank: float, influence: float, **changes) -> Hit:
    values = {
        "rank": rank,
        "document": int(rank) if influence >= 0 else 9,
        "influence": influence,
        "share": abs(influence) / 2,
        "sign": "supports" if influence >= 0 else "opposes",
        "chunk": int(rank) if influence >= 0 else 9,
        "backfilled": influence == 0,
        "neighbours": 0,
        "seen": True,
    }
    return Hit(**{**values, **changes})


def answer(passage: str = PASSAGE, opposers: bool = True) -> Answer:
    solution = Solution(
        np.arange(3),
        np.array([0.8, 0.2, -0.1]),
        0.0,
        0.01,
        0.3,
        0.03,
        1e-9,
        1e-7,
        2,
        9,
        0.9,
        np.zeros(300),
        50,
        moved=3,
    )
    hits = [hit(1, 0.8), hit(2, 0.2, neighbours=1), hit(3, 0.0, seen=False)]
    return Answer(
        query=Query("The Revolution began in", " 1789", np.arange(6), np.array([0, 0, 0, 0, 0, 1.0]), True),
        loss=0.5,
        supporters=hits,
        opposers=[hit(1, -0.1)] if opposers else [],
        passages={1: passage, 2: "Short.", 3: "Other.", 9: "Against it."},
        solution=solution,
        measurement=MeasurementRecord("linear", 300, None, 1.0, 1),
        seconds={"measure": 0.1},
        document_ids={1: "history/one", 2: "history/two", 3: "history/three", 9: "history/against"},
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
    assert "score: influence, 100 for the strongest shown; recovered from 300 subsets" in told
    assert "nats" not in told and "1 scored token, probability 0.61" in told
    assert "R²" not in told  # it is the Lasso's, whose weights are not what is shown
    in_full = together(width, verbose=True)
    assert "λ = 0.03 λ_max, 3 of 50 chunks moved by" in in_full
    assert "relative duality gap 1.0e-07, R² 0.900" in in_full
    assert "40% score +100 history/one" in told and "1 indistinguishable chunk" in told
    assert "██████████" in text and "██░░░░░░░░" in text and "█░░░░░░░░░" in text and "░░░░░░░░░░   –" in text
    assert width >= 140 or PASSAGE in told


@pytest.mark.parametrize("word", ["clear", "weak", "guessing"])
def test_the_verdict_stands_first_and_the_line_between_what_is_above_it_and_below(word: str) -> None:
    found = replace(answer(), verdict=Verdict(word, 0.5, 0.09, 0.01, 0.02, 100), line=0.5)
    lines = shown(120, found).splitlines()
    assert lines[1].startswith(word.capitalize())
    places = [
        next(number for number, line in enumerate(lines) if part in line)
        for part in ("history/one", "below: no stronger", "history/two", "history/three", "history/against")
    ]
    assert places == sorted(places)
    assert "below" not in shown(160)  # not calibrated: there is no line


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
