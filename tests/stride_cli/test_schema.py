"""Schemas derive from typed records; what records really hold is compared in the tests of the commands."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired, TypedDict

import pytest

from stride_cli.schema import json_schema, records
from stride_cli.schema.derivation import name_of, object_schema


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
