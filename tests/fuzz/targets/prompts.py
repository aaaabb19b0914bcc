"""Prompts of any bytes: an answer to each, or what is wrong with it, in order."""

from __future__ import annotations

import contextlib
import io
import json
import random
from functools import cache
from pathlib import Path
from typing import Any

from stride_cli.api import QueryOptions, Session
from stride_cli.commands.prompts import BadInput, answered, read_prompts
from stride_cli.errors import StrideError
from tests.fuzz import allowed, trying
from tests.fuzz.targets.indexes import sample
from tests.fuzz.targets.readers import damaged, json_text

_PLAIN = (
    "The French Revolution began in", "", " ", "a", "漢字 🙂", "[1]", "1984", "-", "true", '"in quotes"',
    '"\\ud800"', "\x1b[31m red", "[red]markup[/]", "\0", "\ufeffmarked", "--help", "word " * 300, "{",
    '{"prompt": "a"', "\u2028", "\u202e", "NaN", "[" * 3000, "9" * 5000, "</s>", "<|endoftext|>", "\ud800",
)  # fmt: skip
_NAMES = ("prompt", "response", "span", "id", "other", "")
_ENDINGS = ("\n", "\n", "\r\n", "\r")


def prompts(r: random.Random) -> None:
    """A file of a few lines: each has an answer or an error with a remedy, in order."""
    data = _data(r)
    trying(data)
    file = _folder() / "prompts.jsonl"
    file.write_bytes(data)
    given = r.choice(({"response": None, "span": None}, {"response": " 1789 Rome", "span": None}))
    options = QueryOptions(read=r.choice((0, 0, 1)), top=r.choice((0, 3)), max_new_tokens=2)
    found: list[int | None] = []

    class Told(BadInput):
        def take(self, error: StrideError, source: str, line: int | None = None, *more: Any) -> None:
            with allowed():  # a remedy, and not too long
                raise error
            assert "\n" not in error.message
            found.append(line)
            super().take(error, source, line, *more)

    out, err = io.StringIO(), io.StringIO()
    bad = Told(r.choice(("skip", "record")), as_json=True)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            read = read_prompts([], file, "stride query")
            for prompt, answer in answered(_session(), read, options, bad, given):
                found.append(prompt.line)
                assert answer.to_record()
        except StrideError as error:
            assert error.fix and not found, f"{error} after {found}"
    assert found == _numbers(data), f"lines {_numbers(data)}, and {found}"
    assert not set(out.getvalue() + err.getvalue()) & set("\x1b\0\u202e\ud800"), "controls are shown"


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
