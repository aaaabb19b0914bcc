"""Answers that `stride query --json` saved, read back and checked."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from stride_cli.characters import shortened
from stride_cli.errors import QueryError, UsageError
from stride_cli.schema import json_schema

_FIX = "save answers with: stride query --file prompts.jsonl --json > answers.jsonl"
_LARGEST = 1e100  # of such, squares and sums are finite too
_KINDS: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
    "null": (type(None),),
}


def read_answers(path: Path) -> list[dict[str, Any]]:
    """The answers in a file of JSON Lines.

    Raises
    ------
    UsageError      there is no such file
    QueryError      a line is no ``stride.answer/1`` record (names the line), or there is none at all
    """
    if not path.is_file():
        raise UsageError(f"there is no file '{path}'", fix=_FIX)
    with path.open(encoding="utf-8", errors="surrogateescape") as lines:
        return parse_answers(lines, str(path))


def parse_answers(lines: Iterable[str], source: str) -> list[dict[str, Any]]:
    """Answers from lines of JSON; keys that the record does not have are let be, and so are records of
    prompts without an answer. Errors as `read_answers`."""
    found = []
    for number, line in enumerate(lines, 1):
        line = line.removeprefix("\ufeff") if number == 1 else line
        if not line.strip():
            continue
        try:
            line.encode()
            record = json.loads(line, parse_constant=_refuse)
        except UnicodeEncodeError as error:
            raise QueryError(f"{source}:{number} is not UTF-8, so it holds no answer", fix=_FIX) from error
        except (ValueError, RecursionError) as error:
            deep = isinstance(error, RecursionError)
            why = "it is nested too deeply" if deep else str(error).partition("; use sys.")[0]
            raise QueryError(f"{source}:{number} is no JSON: {why}", fix=_FIX) from error
        schema = record.get("schema") if isinstance(record, dict) else None
        if schema == "stride.bad_input/1":
            continue  # of a prompt without an answer
        if schema != "stride.answer/1":
            what = f"a {shortened(str(schema), 60)} record" if schema else "no record of stride"
            raise QueryError(f"{source}:{number} is {what} (expected stride.answer/1)", fix=_FIX)
        wrong = _compare(record, json_schema("stride.answer/1"))
        if wrong:
            raise QueryError(f"{source}:{number} is a damaged answer: {wrong}", fix=_FIX)
        found.append(record)
    if not found:
        raise QueryError(f"{source} holds no answer, and a report needs one or more", fix=_FIX)
    return found


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON number")


def _compare(value: Any, schema: Mapping[str, Any], name: str = "") -> str:
    """Where a record does not have the shape that its schema describes; empty where it does."""
    if "properties" in schema:
        if value is None and "null" in schema["type"]:
            return ""
        if not isinstance(value, dict):
            return f"{name} is {type(value).__name__} (expected an object)"
        for key, part in schema["properties"].items():
            if key == "seconds":  # not shown
                continue
            if key not in value:
                if key not in schema["required"]:
                    continue
                return f"{name + '.' if name else ''}{key} is missing"
            wrong = _compare(value[key], part, f"{name}.{key}" if name else key)
            if wrong:
                return wrong
        return ""
    if "items" in schema:
        if not isinstance(value, list):
            return f"{name} is {type(value).__name__} (expected a list)"
        checks = (_compare(item, schema["items"], f"{name}[{place}]") for place, item in enumerate(value))
        return next((wrong for wrong in checks if wrong), "")
    wanted = [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
    kinds = tuple(kind for each in wanted for kind in _KINDS[each])
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        return f"{name} is {reprlib.repr(value)} (expected a {' or '.join(wanted)})"
    if value is None and name.rpartition(".")[2] in ("rank", "confidence"):  # these are never infinite
        return f"{name} is null (expected a number)"
    if isinstance(value, int | float) and not -_LARGEST <= value <= _LARGEST:
        return f"{name} is larger than any number that is measured"
    if name.endswith(".sign") and value not in ("supports", "opposes"):
        return f"{name} is {value!r} (expected supports or opposes)"
    return ""
