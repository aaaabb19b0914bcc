"""The records that commands write to stdout: a promise, compared with real output by a test."""

from __future__ import annotations

from typing import Any

from stride_cli.schema import (
    answer_records,
    audit_records,
    evaluation_records,
    index_records,
    input_records,
    model_records,
    selection_records,
    serve_records,
    train_records,
    tuning_records,
    verify_records,
)
from stride_cli.schema.derivation import name_of, object_schema, records_of

RECORDS: dict[str, type] = {
    name_of(record): record
    for module in (
        answer_records,
        input_records,
        train_records,
        index_records,
        model_records,
        audit_records,
        evaluation_records,
        selection_records,
        tuning_records,
        verify_records,
        serve_records,
    )
    for record in records_of(module)
}


def json_schema(name: str) -> dict[str, Any]:
    """One record's JSON Schema (draft 2020-12).

    Raises
    ------
    KeyError      no such record
    """
    schema = object_schema(RECORDS[name])
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": name, **schema}
