"""The records that commands write to stdout: a promise, compared with real output by a test."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from stride_cli.schema.derivation import name_of, object_schema, records_of

# by name: research may import the product, not the product research
_MODULES = (
    "schema.answer_records",
    "schema.input_records",
    "schema.train_records",
    "schema.index_records",
    "schema.model_records",
    "schema.audit_records",
    "research.evaluation.records",
    "research.selection.records",
    "research.tuning.records",
    "schema.verify_records",
    "schema.serve_records",
)
RECORDS: dict[str, type] = {
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
    schema = object_schema(RECORDS[name])
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": name, **schema}
