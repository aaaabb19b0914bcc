"""Records that commands wrote to stdout, read back and checked, one line after the other."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from stride_cli.characters import shortened
from stride_cli.errors import QueryError
from stride_cli.schema import json_schema

_LARGEST = 1e100  # of such, squares and sums are finite too
_LARGEST_WHOLE = 2**63 - 1  # what tables hold
_KINDS: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
    "null": (type(None),),
}


@dataclass(frozen=True)
class Wanted:
    """Which records are read.

    Attributes
    ----------
    schemas : of str        names of records
    passed_over : of str    names of such that are let be
    fix : str               how to come by a file of them
    """

    schemas: tuple[str, ...]
    passed_over: tuple[str, ...] = ()
    fix: str = ""

    @property
    def in_words(self) -> str:
        *others, last = self.schemas
        return f"{', '.join(others)} or {last}" if others else last


def parse_records(lines: Iterable[str], source: str, wanted: Wanted) -> Iterator[tuple[int, dict[str, Any]]]:
    """Records from lines of JSON, each with the number of its line; empty lines are passed over.

    Parameters
    ----------
    lines :      of text in which a byte that is not UTF-8 is half of a surrogate pair ("surrogateescape")
    source :     what errors call the file

    Raises
    ------
    QueryError      a line is no record of those that are wanted, or a damaged one (names the line)
    """
    for number, line in enumerate(lines, 1):
        line = line.removeprefix("\ufeff") if number == 1 else line
        if not line.strip():
            continue
        where = f"{source}:{number}"
        try:
            line.encode()
            record = json.loads(line, parse_constant=_refuse)
        except UnicodeEncodeError as error:
            raise QueryError(f"{where} is not UTF-8, so it holds no record", fix=wanted.fix) from error
        except (ValueError, RecursionError) as error:
            deep = isinstance(error, RecursionError)
            why = "it is nested too deeply" if deep else str(error).partition("; use sys.")[0]
            raise QueryError(f"{where} is no JSON: {why}", fix=wanted.fix) from error
        schema = record.get("schema") if isinstance(record, dict) else None
        if schema in wanted.passed_over:
            continue
        if schema not in wanted.schemas:
            what = f"a {shortened(str(schema), 60)} record" if schema else "no record of stride"
            raise QueryError(f"{where} is {what} (expected {wanted.in_words})", fix=wanted.fix)
        wrong = _compare(record, _schema(schema))
        if wrong:
            what = "answer" if schema == "stride.answer/1" else f"{schema} record"
            raise QueryError(f"{where} is a damaged {what}: {wrong}", fix=wanted.fix)
        yield number, record


@cache
def _schema(name: str) -> Mapping[str, Any]:
    return json_schema(name)


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
            if key == "seconds":  # is shown nowhere
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
    largest = _LARGEST_WHOLE if "number" not in wanted else _LARGEST
    if isinstance(value, int | float) and not -largest <= value <= largest:
        return f"{name} is larger than any number that is measured"
    if name.endswith(".sign") and value not in ("supports", "opposes"):
        return f"{name} is {value!r} (expected supports or opposes)"
    return ""
