"""From the declaration of a record to its JSON Schema.

A record is the data itself, and no copy of it: a `TypedDict` whose keys are annotated with their meaning,
or a dataclass whose fields (`key`) and properties (`told`) carry it. JSON (`to_record`) and schema derive:
types, keys that may be lacking, descriptions. A number that is not finite is written as null, so that every
float may be null.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import sys
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass
from itertools import count
from types import ModuleType, NoneType, UnionType
from typing import Annotated, Any, Literal, NotRequired, get_args, get_origin, get_type_hints, is_typeddict

_KINDS = {float: "number", int: "integer", str: "string", bool: "boolean", NoneType: "null"}

_order = count()


@dataclass(frozen=True)
class Key:
    """A key of a record that a dataclass holds.

    Attributes
    ----------
    about : its meaning
    name : in the record; empty: as the field or property is called
    optional : earlier records do not have it
    lacking : it is left out where it is None
    at : keys are written in the order in which they are declared
    """

    about: str
    name: str = ""
    optional: bool = False
    lacking: bool = False
    at: int = dataclasses.field(default_factory=lambda: next(_order))


class _Told(property):
    key: Key


def key(
    about: str = "", *, name: str = "", default: Any = MISSING, optional: bool = False, lacking: bool = False
) -> Any:
    """Declare a dataclass's field that is a key of its record; `name`: where it is called otherwise there."""
    declared = Key(about, name, optional or lacking, lacking)
    return dataclasses.field(default=default, metadata={"key": declared})


def told(
    about: str = "", *, name: str = "", optional: bool = False, lacking: bool = False
) -> Callable[[Callable[[Any], Any]], Any]:
    """Declare a dataclass's property that is a key of its record; `lacking`: left out where it is None."""

    def declare(value: Callable[[Any], Any]) -> Any:
        found = _Told(value)
        found.key = Key(about, name, optional or lacking, lacking)
        return found

    return declare


def _keys(cls: type) -> list[tuple[Key, str, str]]:
    """List the keys of a dataclass's record in order: each with its attribute and its type as written."""
    found: dict[str, tuple[Key, str, str]] = {}
    for base in reversed(cls.__mro__):  # inherited keys stand first
        own = [
            (each.metadata["key"], each.name, str(each.type))
            for each in (dataclasses.fields(base) if dataclasses.is_dataclass(base) else ())
            if "key" in each.metadata
        ]
        for name, value in vars(base).items():
            if isinstance(value, _Told) and value.fget is not None:
                own.append((value.key, name, str(value.fget.__annotations__["return"])))
        found |= {each[1]: each for each in sorted(own, key=lambda found: found[0].at)}
    return list(found.values())


def to_record(held: Any) -> Any:
    """Write what a dataclass holds as its record; lists by their items, anything else as it is."""
    if isinstance(held, list):
        return [to_record(each) for each in held]
    if not is_record(type(held)):
        return held
    own = {"schema": held.schema} if hasattr(held, "schema") else {}
    for found, attribute, _ in _keys(type(held)):
        value = getattr(held, attribute)
        if value is not None or not found.lacking:
            own[found.name or attribute] = to_record(value)
    return own


def is_record(kind: Any) -> bool:
    """Tell whether a type is a record, or a part of one."""
    return is_typeddict(kind) or (isinstance(kind, type) and bool(_keys(kind)))


def _hints(record: type) -> dict[str, Any]:
    """Map the keys of a record to their types, annotated with meanings."""
    if is_typeddict(record):
        return get_type_hints(record, include_extras=True)
    names = vars(sys.modules[record.__module__])
    own: dict[str, Any] = {}
    if hasattr(record, "schema"):
        own["schema"] = Literal[record.schema]
    for found, attribute, written in _keys(record):
        hint = eval(written, names)
        if found.lacking:  # where it is there it is not null
            hint = functools.reduce(operator.or_, (part for part in get_args(hint) if part is not NoneType))
        hint = Annotated[hint, found.about] if found.about else hint
        own[found.name or attribute] = NotRequired[hint] if found.optional else hint
    return own


def records_of(module: ModuleType) -> list[type]:
    """The records that a module declares, in order: what has a key "schema"."""
    own = (each for each in vars(module).values() if getattr(each, "__module__", "") == module.__name__)
    return [each for each in own if is_record(each) and "schema" in each.__annotations__]


def name_of(record: type) -> str:
    """The name that a record has in its key "schema"."""
    return str(get_args(_hints(record)["schema"])[0])


def object_schema(record: type, told: Mapping[str, str] | None = None) -> dict[str, Any]:
    """JSON Schema of a record or of a part of one; `told` are meanings of keys that differ here."""
    hints = _hints(record)
    hints = {**({"schema": hints["schema"]} if "schema" in hints else {}), **hints}
    return {
        "type": "object",
        "properties": {key: _value(hint, (told or {}).get(key)) for key, hint in hints.items()},
        "required": [key for key, hint in hints.items() if get_origin(hint) is not NotRequired],
        "additionalProperties": False,
    }


def _value(hint: Any, told: str | None) -> dict[str, Any]:
    if get_origin(hint) is NotRequired:
        return _value(get_args(hint)[0], told)
    if get_origin(hint) is Literal:
        (name,) = get_args(hint)
        return {"type": "string", "description": name, "const": name}
    about: Any = None
    if get_origin(hint) is Annotated:
        hint, about = get_args(hint)
    parts = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    for part in filter(is_record, parts):
        found = object_schema(part, None if isinstance(about, str) else about)
        return found if len(parts) == 1 else {**found, "type": ["object", "null"], "description": about}
    if get_origin(hint) is list and (about is None or is_record(get_args(hint)[0])):
        return {"type": "array", "items": _value(get_args(hint)[0], told)}
    kinds = [_KINDS.get(part) or ("array" if get_origin(part) is list else "object") for part in parts]
    if kinds == ["number"]:
        kinds.append("null")  # not finite
    return {"type": kinds if len(kinds) > 1 else kinds[0], "description": told or about}
