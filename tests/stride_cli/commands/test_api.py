"""The Python interface: what it takes, what it refuses, what it says and how it looks."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from stride_cli import api, output
from tests.stride_cli.commands.test_serve import PROMPT


def test_verbs_take_what_is_open_and_answers_are_three_lines(workspace: Path, few_read: None) -> None:
    session = api.open(workspace / "run.stride")
    assert api.open(session) is session and api.as_place(session) == api.as_place(session.index)
    answer = api.query(session, PROMPT, api.QueryOptions(top=2))
    said, verdict, documents = str(answer).splitlines()
    assert said.startswith(PROMPT) and verdict == f"verdict: {answer.word}"
    assert documents.startswith("documents: French Revolution ") and answer.hits[0].title
    assert repr(session).startswith(f"Session(Index({str(session.index.path)!r}, 60 documents")
    (item,) = api.audit(session, workspace / "corpus.jsonl", options=api.AuditOptions())[:1]
    assert item.verdict and files("stride_cli").joinpath("py.typed").is_file()
    with pytest.raises(api.QueryError, match=r"the prompt is .*expected a text"):
        session.query(5)  # type: ignore[arg-type]


def test_options_are_called_by_their_names_and_have_types(tmp_path: Path) -> None:
    for wrong, said in (("five", "'five'"), (-1, "-1")):
        with pytest.raises(api.UsageError, match=rf"^QueryOptions.top is {said} \(expected") as caught:
            api.QueryOptions(top=wrong)  # type: ignore[arg-type]
        assert caught.value.fix == "try top=10"
    calls: dict[Any, tuple[dict[str, Any], str, str]] = {
        api.build: ({"sources": "c", "model": "m"}, "out", "str | Path"),
        api.train: ({"where": tmp_path}, "options", "ClosedOptions | SgdOptions | None"),
        api.open: ({}, "where", "str | Path | RemotePath | WorkspacePath | Index | Session"),
        api.query: ({"where": tmp_path}, "prompt", "str | Query"),
        api.audit: ({"where": tmp_path}, "benchmark", "str | Path"),
        api.verify_hit: ({"where": tmp_path, "prompt": "a"}, "documents", "Sequence[str] | None"),
    }
    for verb, (given, name, wanted) in calls.items():
        said = rf"^\w+: {name} is 5 \(expected {re.escape(wanted)}\)$"
        with pytest.raises(api.UsageError, match=said) as caught:
            verb(**given, **{name: 5})
        assert str(caught.value.fix).startswith(verb.__name__.removesuffix("_index"))
    with pytest.raises(api.UsageError, match=r"sources is .*5"):
        api.build(["a", 5])  # type: ignore
    with pytest.raises(api.UsageError, match=r"given is .'response': 5. .expected str"):
        api.query(tmp_path, "a", response=5)  # type: ignore
    with pytest.raises(api.CorpusError, match=r"corpus\.jsonl"):  # one file is no list of letters
        api.build(
            str(tmp_path / "corpus.jsonl"), model=files("stride_cli.demo") / "model", out=tmp_path / "o"
        )


def test_notes_go_to_a_logger_and_can_be_quiet(run: Callable[..., Any], capsys: Any) -> None:
    try:
        run("-q schema stride.hit_row/1")
        output.note("a note")
        output.note("warning: a warning")
        assert capsys.readouterr().err == "warning: a warning\n"
        assert logging.getLogger("stride").level == logging.WARNING
    finally:
        api.quiet(False)
        output.os.environ["STRIDE_NO_PROGRESS"] = "1"
    output.note("a note")
    assert capsys.readouterr().err == "a note\n"
