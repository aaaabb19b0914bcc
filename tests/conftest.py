"""Shared by all tests: tiny models, a corpus of chunks in memory, and a quiet environment."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

import pytest

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("STRIDE_NO_PROGRESS", "1")


@cache
def _validator(name: str) -> Any:
    from jsonschema import Draft202012Validator

    from stride_cli.schema import RECORDS, json_schema

    assert name in RECORDS, f"a record calls itself {name}, which stride_cli.schema does not list"
    return Draft202012Validator(json_schema(name))


@pytest.fixture(autouse=True, scope="session")
def records_keep_to_their_schema() -> Iterator[None]:
    """Every record that a test makes a command write is what `stride schema` says it is."""
    from stride_cli import output

    written: Callable[[Mapping[str, Any]], None] = output.emit

    def checked(record: Mapping[str, Any]) -> None:
        if "$schema" not in record:  # a schema itself, of `stride schema`
            assert "schema" in record, f"a record without a schema: {sorted(record)}"
            _validator(record["schema"]).validate(json.loads(output.to_json(record)))
        written(record)

    output.emit = checked
    yield
    output.emit = written
