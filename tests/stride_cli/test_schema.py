"""Schemas are themselves well formed; what records really hold is compared in the tests of the commands."""

from __future__ import annotations

import pytest

from stride_cli.schema import RECORDS, json_schema


@pytest.mark.parametrize("name", RECORDS)
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


def test_optional_keys_are_not_required() -> None:
    schema = json_schema("stride.answer/1")
    assert "id" in schema["properties"] and "id" not in schema["required"]
