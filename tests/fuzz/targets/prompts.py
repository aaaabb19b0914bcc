"""Prompts of any bytes, from a file or stdin: an answer to each, or what is wrong with it, in order."""

from __future__ import annotations

import contextlib
import io
import json
import random
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import typer

from stride_cli.api import QueryOptions, Session
from stride_cli.commands.prompts import BadInput, answered, read_prompts
from stride_cli.errors import StrideError
from tests.fuzz import allowed, trying
from tests.fuzz.targets.indexes import said, sample
from tests.fuzz.targets.readers import damaged, json_text

_PLAIN = (
    "The French Revolution began in", "", " ", "a", "漢字 🙂", "[1]", "1984", "-", "true", '"in quotes"',
    '"\\ud800"', "\x1b[31m red", "[red]markup[/]", "\0", "\ufeffmarked", "--help", "word " * 300, "{",
    '{"prompt": "a"', "\u2028", "\u202e", "NaN", "[" * 3000, "9" * 5000, "</s>", "<|endoftext|>", "\ud800",
)  # fmt: skip
_NAMES = ("prompt", "response", "span", "id", "other", "")
_ENDINGS = ("\n", "\n", "\r\n", "\r")

Outcome = tuple[str, int | None, Any]  # "answer" or "bad"; the line; what is said


def prompts(r: random.Random) -> None:
    """A few lines; with each --on-bad, as a file or as stdin, the same becomes of them."""
    data = _data(r)
    trying(data)
    given = r.choice(({"response": None, "span": None}, {"response": " 1789 Rome", "span": None}))
    options = QueryOptions(read=r.choice((0, 0, 1)), top=r.choice((0, 3)), max_new_tokens=2)
    together = r.choice((None, 1))
    found = {
        on_bad: _ask(r.choice((True, False)), data, on_bad, options, given, together)
        for on_bad in ("error", "skip", "record")
    }
    kinds = [(kind, line) for kind, line, _ in found["skip"]]
    assert [line for _, line in kinds] == _numbers(data), f"lines {_numbers(data)}, and {found['skip']}"
    assert [each[:2] for each in found["record"]] == kinds, found
    for (kind, _, said_first), (_, _, said_then) in zip(found["skip"], found["record"], strict=True):
        assert kind == "bad" or said_first["response"] == said_then["response"], found
    # with "error" as far as the first that is bad
    bad = [place for place, (kind, _) in enumerate(kinds) if kind == "bad"]
    assert [each[:2] for each in found["error"]] == kinds[: bad[0] + 1 if bad else None], found


def _ask(
    as_file: bool,
    data: bytes,
    on_bad: str,
    options: QueryOptions,
    given: Mapping[str, Any],
    together: int | None,
) -> list[Outcome]:
    """What becomes of every line, in order."""
    found: list[Outcome] = []

    class Told(BadInput):
        def take(
            self, error: StrideError, source: str, line: int | None = None, id: str | None = None
        ) -> None:
            with allowed():  # a remedy, and not too long
                raise error
            assert "\n" not in error.message and line is not None
            found.append(("bad", line, error.message))
            super().take(error, source, line, id)

    out, err = io.StringIO(), io.StringIO()
    with (
        _asked(as_file, data) as (text, file),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        bad = Told(on_bad, as_json=True)
        code = 0
        try:
            for prompt, answer in answered(
                _session(),
                read_prompts([text] if text else [], file, "stride query"),
                options,
                bad,
                given,
                together=together,
            ):
                found.append(("answer", prompt.line, said(answer)))
            bad.leave()
        except typer.Exit as left:
            code = left.exit_code
        except StrideError as error:
            code = 2
            assert error.fix
            assert on_bad == "error" or not found, f"{on_bad}: {error} after {found}"
    wrong = sum(kind == "bad" for kind, _, _ in found)
    assert code == (2 if wrong or not found else 0)
    records = [json.loads(line) for line in out.getvalue().splitlines()]
    lines = [line for kind, line, _ in found if kind == "bad"] if on_bad == "record" else []
    assert [record["line"] for record in records] == lines
    assert not set(out.getvalue() + err.getvalue()) & set("\x1b\0\u202e\ud800"), "controls are shown"
    return found


@contextlib.contextmanager
def _asked(as_file: bool, data: bytes) -> Iterator[tuple[str | None, Path | None]]:
    if as_file:
        file = _folder() / "prompts.jsonl"
        file.write_bytes(data)
        yield None, file
        return
    with mock.patch.object(sys, "stdin", io.TextIOWrapper(io.BytesIO(data))):
        yield "-", None


def _numbers(data: bytes) -> list[int]:
    """The lines that hold a prompt, good or bad."""
    text = io.TextIOWrapper(io.BytesIO(data), encoding="utf-8", errors="surrogateescape").read()
    lines = text.removeprefix("\ufeff").split("\n")
    return [number for number, line in enumerate(lines, 1) if line.strip()]


def _data(r: random.Random) -> bytes:
    lines = [_line(r) + r.choice(_ENDINGS) for _ in range(r.choice((0, 1, 2, 3, 4)))]
    text = r.choice(("", "", "", "\ufeff")) + "".join(lines)
    if r.random() < 0.1:
        return text.encode("utf-16", "surrogatepass")
    if r.random() < 0.05:
        return text.encode("latin-1", "replace")
    data = text.encode("utf-8", "surrogatepass")
    return damaged(r, data)[:20_000] if r.random() < 0.4 else data


def _line(r: random.Random) -> str:
    """A line that is often a prompt, or nearly one."""
    kind = r.randrange(4)
    if kind == 0:
        return r.choice(_PLAIN)
    if kind == 1:
        return json_text(r)
    value = lambda: json_text(r) if r.random() < 0.3 else json.dumps(r.choice(_PLAIN))  # noqa: E731
    pairs = [f'"prompt": {value()}'] if r.random() < 0.8 else []
    pairs += [f"{json.dumps(r.choice(_NAMES))}: {value()}" for _ in range(r.randrange(3))]
    return "{" + ", ".join(pairs) + "}"


@cache
def _session() -> Session:
    whole = sample()
    return Session.open(whole.path, model=whole.model)


@cache
def _folder() -> Path:
    place = sample().home / "prompts"  # which goes when the process ends
    place.mkdir()
    return place


TARGETS = {"prompts": prompts}
PREPARE = sample
