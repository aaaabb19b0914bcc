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
from stride_cli.recovery.recall import Recall

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
    )
    hits = [hit(1, 0.8), hit(2, 0.2, neighbours=1), hit(3, 0.0, seen=False)]
    return Answer(
        query=Query("The Revolution began in", " 1789", np.arange(6), np.array([0, 0, 0, 0, 0, 1.0]), True),
        loss=0.5,
        supporters=hits,
        opposers=[hit(1, -0.1)] if opposers else [],
        passages={1: passage, 2: "Short.", 3: "Other.", 9: "Against it."},
        solution=solution,
        influences=solution,
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


def test_where_numbers_come_from_is_told() -> None:
    assert "not read" not in shown(100)
    read = together(100, replace(answer(), read=40, stated_recall=Recall(10, 9, 0.95)))
    assert "40 chunks read from their own gradients, others recovered from 300 subsets" in read
    assert "with 95% confidence at least 9 of the 10 strongest chunks were read" in read
    assert read.count("estimated, not read") == 3  # of four hits: one has no weight at all
    estimated = replace(answer(), read=40, estimated=True)
    assert "from projections, shared pairs of tokens and 300 subsets" in together(100, estimated)
    many = replace(estimated, solution=replace(estimated.solution, n_chunks=300 * 64 + 1))
    assert "estimated from projections and shared pairs of tokens" in together(100, many)
    assert "cannot be told" in together(100, replace(answer(), read=40, stated_recall=Recall(10, 0, 0.95)))


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
    assert "of the recovery: λ = 0.03 λ_max, 3 of 50 chunks non-zero" in in_full
    assert "relative duality gap 1.0e-07, R² 0.900" in in_full
    assert "40% score +100 history/one" in told and "1 indistinguishable chunk" in told
    assert "██████████" in text and "██░░░░░░░░" in text and "█░░░░░░░░░" in text and "░░░░░░░░░░   –" in text
    assert width >= 140 or PASSAGE in told


@pytest.mark.parametrize(("width", "beside"), [(139, False), (140, True), (160, True)])
def test_opposers_stand_beside_supporters_where_there_is_room(width: int, beside: bool) -> None:
    lines = [line for line in shown(width).splitlines() if "documents that support this" in line]
    assert ("documents that oppose this" in lines[0]) is beside
    alone = shown(width, answer(opposers=False))
    assert PASSAGE in " ".join(alone.split()) and "oppose" not in alone


def test_words_shared_with_the_query_are_highlighted(monkeypatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[1;33mRevolution\x1b[0m" in shown(100, colour=True)
    monkeypatch.setenv("NO_COLOR", "1")
    plain = shown(100, colour=True)
    assert "\x1b[1mRevolution\x1b[0m" in plain
    assert not any(f"\x1b[{code}m" in plain or f";{code}m" in plain for code in range(30, 38))


def test_verbose_explains_in_two_sentences() -> None:
    assert "Look at history/one, which moved the model" in together(160, verbose=True)
    assert "Look at" not in shown(160) and shown(160).splitlines()[1].startswith("No verdict: ")


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


def test_bars_leave_stdout_alone_and_one_within_another_is_below_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """stderr is a terminal, stdout a file: rich would write records to the terminal."""
    import sys

    from stride_cli import output

    monkeypatch.delenv("STRIDE_NO_PROGRESS", raising=False)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with output.progress("the whole") as outer, output.progress("a part", 2, unit="steps") as inner:
        outer.describe("all of it")
        inner.advance()
        print("a record")
        assert output._bars is not None and len(output._bars.tasks) == 2
        told = output._bars.make_tasks_table(output._bars.tasks)
    assert output._bars is None
    found = capsys.readouterr()
    assert found.out == "a record\n" and "a record" not in found.err
    assert told.row_count == 2 and "\x1b[?25l" not in found.err  # the cursor is never hidden


def test_the_next_command_can_be_pasted(capsys: pytest.CaptureFixture[str]) -> None:
    import shlex

    from stride_cli.commands.tables import next_step

    next_step("stride", "ask", "a b/*.jsonl", "--model", "it's", "…")
    said = capsys.readouterr().err
    assert said == "next: stride ask 'a b/*.jsonl' --model 'it'\"'\"'s' \"…\"\n"
    assert shlex.split(said)[1:] == ["stride", "ask", "a b/*.jsonl", "--model", "it's", "…"]
