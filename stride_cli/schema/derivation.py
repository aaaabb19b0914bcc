"""JSON and JSON Schema of a record, from its declaration.

A record is a dataclass that derives from `Record`, or a `TypedDict`, whose fields are annotated with their
meaning: ``loss: Annotated[float, "mean nats per scored token"]``. Types, keys that may be lacking and
descriptions of its schema derive from that, and its JSON too. A number that is not finite is written as null,
so that every float may be null.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from types import ModuleType, NoneType, UnionType
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    NotRequired,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

_KINDS = {float: "number", int: "integer", str: "string", bool: "boolean", NoneType: "null"}


class Record:
    """Base of a dataclass that is written as JSON.

    A field with a default may be lacking in records that were saved before. One that is
    ``Annotated[…] | None`` is left out where it is None. An underscore at the end of a name is no part of it.

    Attributes
    ----------
    schema : str        name and version, "stride.setting/1"; "" of a part of a record
    """

    schema: ClassVar[str] = ""

    def to_record(self) -> dict[str, Any]:
        """The record as JSON has it."""
        own: Any = type(self)
        found: dict[str, Any] = {"schema": self.schema} if self.schema else {}
        for name, (_, left_out) in _declared(own).items():
            value = getattr(self, name)
            if value is not None or not left_out:
                found[name.rstrip("_")] = _written(value)
        return found


def _written(value: Any) -> Any:
    if isinstance(value, Record):
        return value.to_record()
    if isinstance(value, Mapping):
        return dict(value)
    return [_written(each) for each in value] if isinstance(value, list | tuple) else value


@cache
def _declared(record: Any) -> dict[str, tuple[Any, bool]]:
    """The fields of a dataclass that have a meaning: its annotation, and whether None is left out."""
    hints, found = get_type_hints(record, include_extras=True), {}
    for each in fields(record):
        hint, parts = hints[each.name], get_args(hints[each.name])
        left_out = get_origin(hint) in (UnionType, Union) and any(get_origin(p) is Annotated for p in parts)
        if left_out:
            (hint,) = (part for part in parts if part is not NoneType)
        if _has_meaning(hint):
            found[each.name] = (hint, left_out)
    return found


def _has_meaning(hint: Any) -> bool:
    """Whether a field is part of the record: it has a meaning, or is a record, or a list of them."""
    if get_origin(hint) is Annotated or _is_part(hint):
        return True
    parts = get_args(hint)
    return get_origin(hint) in (list, tuple, UnionType, Union) and any(_has_meaning(part) for part in parts)


def _is_part(hint: Any) -> bool:
    return is_typeddict(hint) or (isinstance(hint, type) and issubclass(hint, Record))


def records_of(module: ModuleType) -> list[type]:
    """The records that a module declares, in order: what has a schema of its own."""
    declared = (each for each in vars(module).values() if getattr(each, "__module__", "") == module.__name__)
    return [each for each in declared if _is_part(each) and name_of(each)]


def name_of(record: type) -> str:
    """The name that a record has in its key "schema"; "" of a part of one."""
    if not is_typeddict(record):
        return str(record.schema)  # type: ignore[attr-defined]
    hint = get_type_hints(record).get("schema")
    return str(get_args(hint)[0]) if hint else ""


def object_schema(record: type, told: Mapping[str, str] | None = None) -> dict[str, Any]:
    """JSON Schema of a record or of a part of one; `told` are meanings of keys that differ here."""
    name, properties, required = name_of(record), {}, []
    if name:
        properties["schema"] = {"type": "string", "description": name, "const": name}
        required.append("schema")
    for key, hint, may_lack in _keys(record):
        properties[key] = _value(hint, (told or {}).get(key))
        required += [] if may_lack else [key]
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def _keys(record: type) -> list[tuple[str, Any, bool]]:
    """The keys beside "schema": name, annotation, whether it may be lacking."""
    if is_dataclass(record):
        defaults = {e.name for e in fields(record) if (e.default, e.default_factory) != (MISSING, MISSING)}
        return [
            (name.rstrip("_"), hint, left_out or name in defaults)
            for name, (hint, left_out) in _declared(record).items()
        ]
    hints = get_type_hints(record, include_extras=True)
    return [(key, hint, get_origin(hint) is NotRequired) for key, hint in hints.items() if key != "schema"]


def described(record: type) -> dict[str, str]:
    """The meanings of the keys."""
    return {key: found["description"] for key, found in object_schema(record)["properties"].items()}


def _value(hint: Any, told: str | None) -> dict[str, Any]:
    if get_origin(hint) is NotRequired:
        return _value(get_args(hint)[0], told)
    if get_origin(hint) is Literal:
        (name,) = get_args(hint)
        return {"type": "string", "description": name, "const": name}
    about: Any = None
    if get_origin(hint) is Annotated:
        hint, about = get_args(hint)
    parts = get_args(hint) if get_origin(hint) in (UnionType, Union) else (hint,)
    for part in filter(_is_part, parts):
        found = object_schema(part, None if isinstance(about, str) else about)
        return found if len(parts) == 1 else {**found, "type": ["object", "null"], "description": about}
    if about is None:
        return {"type": "array", "items": _value(get_args(hint)[0], told)}
    kinds = [
        _KINDS.get(part) or ("array" if get_origin(part) in (list, tuple) else "object") for part in parts
    ]
    if kinds == ["number"]:
        kinds.append("null")  # not finite
    return {"type": kinds if len(kinds) > 1 else kinds[0], "description": told or about}
