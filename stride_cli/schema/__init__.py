"""The records that commands write to stdout: a promise, compared with real output by a test."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

from stride_cli.schema.derivation import name_of, object_schema, records_of

# by name: a record stands where its data is, in rooms above this one, and in research
_MODULES = (
    "attribution.answer",
    "schema.answer_records",
    "config",
    "schema.train_records",
    "attribution.nats",
    "schema.index_records",
    "schema.model_records",
    "schema.audit_records",
    "research.evaluation.records",
    "research.selection.records",
    "research.tuning.records",
    "schema.verify_records",
    "schema.serve_records",
)


@cache
def records() -> dict[str, type]:
    """All records by name."""
    return {
        name_of(record): record
        for module in _MODULES
        for record in records_of(import_module(f"stride_cli.{module}"))
    }


def json_schema(name: str) -> dict[str, Any]:
    """Derive one record's JSON Schema (draft 2020-12).

    Raises
    ------
    KeyError      no such record
    """
    schema = object_schema(records()[name])
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": name, **schema}
