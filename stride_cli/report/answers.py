"""Read answers that `stride query --json` saved."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from stride_cli.errors import QueryError, UsageError
from stride_cli.formats.saved_records import parse_records

_FIX = "save answers with: stride query --file prompts.jsonl --json > answers.jsonl"


def read_answers(path: Path) -> list[dict[str, Any]]:
    """Read the answers in a file of JSON Lines.

    Raises
    ------
    UsageError      there is no such file
    QueryError      a line is no ``stride.answer/1`` record (names the line), or there is none at all
    """
    if not path.exists() or path.is_dir():
        raise UsageError(f"there is no file '{path}'", fix=_FIX)
    with path.open(encoding="utf-8", errors="surrogateescape") as lines:
        return parse_answers(lines, str(path))


def parse_answers(lines: Iterable[str], source: str) -> list[dict[str, Any]]:
    """Read answers from lines of JSON; keys that the record does not have are let be, and so are records of
    prompts without an answer. Errors as `read_answers`."""
    found = list(parse_records(lines, source, "stride.answer/1", fix=_FIX))
    if not found:
        raise QueryError(f"{source} holds no answer, and a report needs one or more", fix=_FIX)
    return found
