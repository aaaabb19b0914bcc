"""Schemas derive from typed records; what records really hold is compared in the tests of the commands."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, NotRequired, TypedDict

import pytest

from stride_cli.schema import json_schema, records
from stride_cli.schema.derivation import key, name_of, object_schema, to_record, told


class Part(TypedDict):
    mean: Annotated[float, "a mean"]
    count: Annotated[int, "a count"]


class Whole(Part):
    schema: Literal["stride.whole/7"]
    text: NotRequired[Annotated[str | None, "perhaps"]]
    parts: list[Part]
    other: Annotated[Part, {"mean": "another mean"}]
    ids: list[Annotated[int, "an id"]]
    mask: Annotated[list[Any] | None, "ones"]
    told: Annotated[dict[str, Any], "anything"]
    value: Annotated[str | float | bool | None, "one of these"]


@dataclass(frozen=True)
class Held:
    """A dataclass that is its record: `counted` is known by another name, `hidden` by none."""

    schema: ClassVar[str] = "stride.held/1"
    hidden: int
    text: str | None = key("perhaps", lacking=True)

    @told("a count", name="count")
    def counted(self) -> int:
        return self.hidden + 1

    part: Part = key()
    parts: list[Other] = key(optional=True)


@dataclass(frozen=True)
class Other:
    mean: float | None = key("a mean")


def test_a_dataclass_is_declared_once() -> None:
    part = {"mean": {"type": ["number", "null"], "description": "a mean"}}
    count = {"count": {"type": "integer", "description": "a count"}}
    found = object_schema(Held)
    assert name_of(Held) == "stride.held/1" and found["required"] == ["schema", "count", "part"]
    assert list(found["properties"]) == ["schema", "text", "count", "part", "parts"]
    assert found["properties"]["text"] == {"type": "string", "description": "perhaps"}
    assert found["properties"]["part"]["properties"] == part | count
    assert found["properties"]["parts"]["items"]["properties"] == part
    held = Held(1, None, {"mean": 0.5, "count": 3}, [Other(None)])
    record = {"schema": "stride.held/1", "count": 2, "part": held.part, "parts": [{"mean": None}]}
    assert to_record(held) == record and list(to_record(replace(held, text="a")))[1] == "text"


@pytest.mark.parametrize("name", records())
def test_every_leaf_has_a_type_and_a_meaning(name: str) -> None:
    def walk(node: dict) -> None:
        if "properties" in node:
            assert set(node["required"]) <= set(node["properties"])
            for child in node["properties"].values():
                walk(child)
        elif node["type"] == "array":
            walk(node["items"])
        else:
            assert node["description"]

    schema = json_schema(name)
    assert schema["title"] == name and schema["properties"]["schema"]["description"] == name
    walk(schema)


def test_a_schema_is_what_the_types_say() -> None:
    number = {"type": ["number", "null"], "description": "a mean"}
    part = {"mean": number, "count": {"type": "integer", "description": "a count"}}
    closed = {"type": "object", "required": ["mean", "count"], "additionalProperties": False}
    found = object_schema(Whole)
    assert name_of(Whole) == "stride.whole/7"
    assert set(found["properties"]) - set(found["required"]) == {"text"}
    assert found["properties"] == {
        "schema": {"type": "string", "description": "stride.whole/7", "const": "stride.whole/7"},
        **part,
        "text": {"type": ["string", "null"], "description": "perhaps"},
        "parts": {"type": "array", "items": {**closed, "properties": part}},
        "other": {**closed, "properties": {**part, "mean": {**number, "description": "another mean"}}},
        "ids": {"type": "array", "items": {"type": "integer", "description": "an id"}},
        "mask": {"type": ["array", "null"], "description": "ones"},
        "told": {"type": "object", "description": "anything"},
        "value": {"type": ["string", "number", "boolean", "null"], "description": "one of these"},
    }
