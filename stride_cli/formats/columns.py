"""Columns of tables, derived from the declaration of a record; and the rows that records come to."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, NotRequired, get_args, get_origin, get_type_hints, is_typeddict

from stride_cli.schema.answer_records import AnswerRecord, HitRecord, HitRow
from stride_cli.schema.audit_records import AuditRecord
from stride_cli.schema.input_records import BadInputRecord

Row = dict[str, Any]
_LISTS = ("hits", "opposers")  # of an answer


@dataclass(frozen=True)
class Column:
    """A column: the keys that lead to its value in a record, and the value's type (it may be None too, and is
    where `optional` in some records that have all keys)."""

    path: tuple[str, ...]
    kind: type  # str, float, int or bool
    optional: bool = False

    @property
    def name(self) -> str:
        return "_".join(self.path)

    def of(self, record: Mapping[str, Any]) -> Any:
        """The value that a record has there; None where it has none, or a number that is not finite."""
        value: Any = record
        for key in self.path:
            value = value.get(key) if isinstance(value, Mapping) else None
        if value is None:
            return None
        if self.kind is float:
            return float(value) if math.isfinite(value) else None
        return self.kind(value)


def columns_of(record: type) -> tuple[Column, ...]:
    """The columns of a record: its keys, those of objects within it joined by underscores.

    Without "schema", which names the record, seconds, and lists, which are tables of their own.
    """
    return tuple(_columns(record, ()))


def _columns(record: type, before: tuple[str, ...]) -> Iterator[Column]:
    for key, hint in get_type_hints(record, include_extras=True).items():
        while get_origin(hint) in (NotRequired, Annotated):
            hint = get_args(hint)[0]
        parts = get_args(hint) if isinstance(hint, UnionType) else (hint,)
        kind = next(part for part in parts if part is not NoneType)
        if key in ("schema", "seconds") or get_origin(kind) is list:
            continue
        if is_typeddict(kind):
            yield from _columns(kind, (*before, key))
        else:
            yield Column((*before, key), kind, NoneType in parts)


@cache
def hit_columns() -> tuple[Column, ...]:
    """Of one row a hit, as ``stride schema stride.hit_row/1`` describes them."""
    return columns_of(HitRow)


@cache
def tables() -> dict[str, tuple[Column, ...]]:
    """The columns of records by their name in "schema"; hits without what is their answer's."""
    return {
        "stride.answer/1": columns_of(AnswerRecord),
        "stride.hit/1": (Column(("list",), str), *columns_of(HitRecord)),
        "stride.audit/1": columns_of(AuditRecord),
        "stride.bad_input/1": columns_of(BadInputRecord),
    }


def listed_hits(answer: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The hits of a ``stride.answer/1`` record, each with the list that it is on; supporters first."""
    lacking = dict.fromkeys(HitRecord.__annotations__)
    for name in _LISTS:
        for hit in answer[name]:
            yield {**lacking, **hit, "list": name}


def hit_rows(answer: Mapping[str, Any], number: int = 1) -> list[Row]:
    """A ``stride.answer/1`` record as one row a hit, by the names of `hit_columns`.

    Parameters
    ----------
    number :     of the answer, from 1; two answers to one prompt have different ones
    """
    # a key that both have is the hit's
    wholes = ({**answer, **hit, "answer": number} for hit in listed_hits(answer))
    return [{column.name: column.of(whole) for column in hit_columns()} for whole in wholes]
