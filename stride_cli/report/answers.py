"""Files of answers: read those that `stride query --json` saved, checked by their schema; write CSV."""

from __future__ import annotations

import csv
import json
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from stride_cli.attribution.frames import hit_columns, hit_rows
from stride_cli.characters import cell, printable, refuse_constant, shortened
from stride_cli.errors import QueryError, UsageError
from stride_cli.schema import json_schema

_ANSWER = "stride.answer/1"
_FIX = "save answers with: stride query --file prompts.jsonl --json > answers.jsonl"
_LARGEST = 1e100  # squares and sums of such numbers are finite
_LARGEST_WHOLE = 2**63 - 1
_KINDS: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
    "null": (type(None),),
    "array": (list,),
    "object": (dict,),
}


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
    """Read answers from lines of JSON, checked against their schema; errors as of `read_answers`.

    Empty lines, records of prompts without an answer, and keys that the schema does not have are let be. A
    byte that is not UTF-8 is half of a surrogate pair in `lines` ("surrogateescape").
    """
    schema = json_schema(_ANSWER)
    answers = []
    for number, line in enumerate(lines, 1):
        line = line.removeprefix("\ufeff") if number == 1 else line
        if not line.strip():
            continue
        where = f"{source}:{number}"
        try:
            line.encode()
            record = json.loads(line, parse_constant=refuse_constant)
        except UnicodeEncodeError as error:
            raise QueryError(f"{where} is not UTF-8, so it holds no record", fix=_FIX) from error
        except RecursionError as error:
            raise QueryError(f"{where} is no JSON: it is nested too deeply", fix=_FIX) from error
        except ValueError as error:
            reason = str(error).partition("; use sys.")[0]
            raise QueryError(f"{where} is no JSON: {reason}", fix=_FIX) from error
        found = record.get("schema") if isinstance(record, dict) else None
        if found == "stride.bad_input/1":
            continue
        if found != _ANSWER:
            what = f"a {shortened(str(found), 60)} record" if found else "no record of stride"
            raise QueryError(f"{where} is {what} (expected {_ANSWER})", fix=_FIX)
        if wrong := next(_problems(record, schema), None):
            raise QueryError(f"{where} is a damaged {_ANSWER} record: {wrong}", fix=_FIX)
        answers.append(record)
    if not answers:
        raise QueryError(f"{source} holds no answer, and a report needs one or more", fix=_FIX)
    return answers


def _problems(value: Any, schema: Mapping[str, Any], name: str = "") -> Iterator[str]:
    """Yield each place where a value differs from its schema."""
    kinds = [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
    types = tuple(kind for each in kinds for kind in _KINDS[each])
    largest = _LARGEST if "number" in kinds else _LARGEST_WHOLE
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        yield f"{name} is {reprlib.repr(value)} (expected {' or '.join(kinds)})"
    elif isinstance(value, dict):
        for key, part in schema.get("properties", {}).items():
            inner = f"{name}.{key}" if name else key
            if key in value and key != "seconds":  # seconds are not shown anywhere
                yield from _problems(value[key], part, inner)
            elif key in schema["required"] and key != "seconds":
                yield f"{inner} is missing"
    elif isinstance(value, list):
        for place, item in enumerate(value):
            yield from _problems(item, schema.get("items", {"type": list(_KINDS)}), f"{name}[{place}]")
    elif value is None and name.rpartition(".")[2] in ("rank", "confidence"):  # these are never infinite
        yield f"{name} is null (expected a number)"
    elif isinstance(value, int | float) and not -largest <= value <= largest:
        yield f"{name} is larger than any number that is measured"
    elif name.endswith(".sign") and value not in ("supports", "opposes"):
        yield f"{name} is {value!r} (expected supports or opposes)"


class CsvTable:
    """Writes answers as CSV: a header, then one line a hit; an empty cell is None.

    Text that a spreadsheet would run as a formula gets an apostrophe in front. Characters that would steer a
    terminal are escaped.
    """

    def __init__(self, out: IO[str]) -> None:
        self._out = out
        self._number = 0
        self._writer = csv.DictWriter(out, list(hit_columns()), lineterminator="\n")
        self._writer.writeheader()

    def add(self, answer: Mapping[str, Any]) -> None:
        """Write the hits of a ``stride.answer/1`` record."""
        self._number += 1
        for row in hit_rows(answer, self._number):
            texts = {name: cell(printable(text)) for name, text in row.items() if isinstance(text, str)}
            self._writer.writerow(row | texts)
        self._out.flush()
