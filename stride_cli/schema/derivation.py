"""From the declaration of a record to its JSON Schema.

A record is a `TypedDict` whose keys are annotated with their meaning, and it is the data itself, not a copy
of it. mypy checks what builds one against it, and its schema derives: types, keys that may be lacking,
descriptions. A number that is not finite is written as null, so that every float may be null.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType, NoneType, UnionType
from typing import Annotated, Any, Literal, NotRequired, get_args, get_origin, get_type_hints, is_typeddict

_KINDS = {float: "number", int: "integer", str: "string", bool: "boolean", NoneType: "null"}


def records_of(module: ModuleType) -> list[type]:
    """The records that a module declares, in order: what has a key "schema"."""
    own = (each for each in vars(module).values() if getattr(each, "__module__", "") == module.__name__)
    return [each for each in own if is_typeddict(each) and "schema" in each.__annotations__]


def name_of(record: type) -> str:
    """The name that a record has in its key "schema"."""
    return str(get_args(get_type_hints(record)["schema"])[0])


def object_schema(record: type, told: Mapping[str, str] | None = None) -> dict[str, Any]:
    """JSON Schema of a record or of a part of one; `told` are meanings of keys that differ here."""
    hints = get_type_hints(record, include_extras=True)
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
    for part in filter(is_typeddict, parts):
        found = object_schema(part, None if isinstance(about, str) else about)
        return found if len(parts) == 1 else {**found, "type": ["object", "null"], "description": about}
    if about is None:
        return {"type": "array", "items": _value(get_args(hint)[0], told)}
    kinds = [_KINDS.get(part) or ("array" if get_origin(part) is list else "object") for part in parts]
    if kinds == ["number"]:
        kinds.append("null")  # not finite
    return {"type": kinds if len(kinds) > 1 else kinds[0], "description": told or about}
