"""The keys of every record that commands write to stdout: a promise, compared with real output by a test."""

from __future__ import annotations

from typing import Any

from stride_cli.schema.audit_records import AUDIT_RECORDS
from stride_cli.schema.evaluation_records import EVALUATION_RECORDS
from stride_cli.schema.index_records import INDEX_RECORDS
from stride_cli.schema.model_records import MODEL_RECORDS
from stride_cli.schema.selection_records import SELECTION_RECORDS
from stride_cli.schema.tuning_records import TUNING_RECORDS
from stride_cli.schema.verify_records import VERIFY_RECORDS

_HIT = {
    "rank": ("number", "position, 1 = most influential; ties share their mid-rank"),
    "document": ("string", "the document's id"),
    "influence": (
        "number",
        "nats per scored token, summed over the document's chunks; > 0 supports, < 0 opposes",
    ),
    "share": ("number", "|influence| / Σ|influence of every chunk|, 0 … 1"),
    "sign": ("string", '"supports" or "opposes"'),
    "chunk": ("integer", "the document's most influential chunk, numbered in the index"),
    "passage": ("string", "the sentence of that chunk most like the query"),
    "label": ("string", "of a classifier: the training row's label", "optional"),
    "seen": ("boolean", "whether the fit of the operators has seen that chunk"),
    "neighbours": ("integer", "other chunks that share all but one of its subsets: not told apart from it"),
    "backfilled": (
        "boolean",
        "not in the sparse solution: ranked by correlation with what it leaves unexplained",
    ),
    "prior": (
        "number",
        "with --prior: what it adds to the influence, nats; the rank is by the sum. Else null",
        "optional",
    ),
    "stability": (
        "number",
        "with --stability: share of random halves of the subsets in which the document's influence keeps it "
        "on a list of this length, 0 … 1; null where that was not measured",
        "optional",
    ),
}
RECORDS: dict[str, dict[str, Any]] = {
    "stride.answer/1": {
        "schema": ("string", "stride.answer/1"),
        "id": ("string", "the query's id, where its file gave one", "optional"),
        "prompt": ("string", "the prompt"),
        "response": ("string", "the continuation that is attributed"),
        "generated": ("boolean", "whether the model wrote the response"),
        "scored_tokens": ("integer", "tokens of the response whose loss is attributed"),
        "loss": ("number", "the model's loss on them, mean nats per scored token"),
        "hits": [_HIT],
        "opposers": [_HIT],
        "reliability": (
            "number",
            "with --stability: correlation of what the subsets that a random half leaves out answered with "
            "what the half predicts of it, mean over halves, 0 … 1. Else null",
            "optional",
        ),
        "prior": (
            "string or null",
            '"tfidf" or "pairs": hits are ranked by influence and overlap together; null: by influence',
            "optional",
        ),
        "recovery": {
            "lambda": ("number", "ℓ1 penalty, nats"),
            "lambda_ratio": ("number", "λ / λ_max"),
            "nonzeros": ("integer", "chunks with non-zero influence"),
            "duality_gap": ("number", "upper bound on how far the objective is from its minimum, nats²"),
            "relative_gap": ("number", "the gap / ½‖y − ȳ‖²"),
            "r_squared": ("number", "share of the responses' variance that the influences explain"),
            "passes": ("integer", "passes over the design matrix"),
            "refined": (
                "integer",
                "with --refine: chunks whose influence was read from their own gradients",
                "optional",
            ),
            "shrink_exponent": (
                "number",
                "small influences were made smaller: times (|w| / largest |w|)^(this − 1); 1: they were not",
                "optional",
            ),
            "shrink_opposing": (
                "number",
                "what negative influences were multiplied by, too; 1: they were not",
                "optional",
            ),
        },
        "measurement": {
            "method": ("string", '"linear" or "exact"'),
            "subsets": ("integer", "K, responses measured"),
            "agreement": (
                "number",
                "Pearson correlation of linear and exact responses, where both were measured",
            ),
            "coverage": ("number", "share of all chunks that the operators have seen"),
            "models": ("integer", "that measured: the index's own and its further checkpoints", "optional"),
        },
        "explanation": (
            "string",
            "two sentences on what the numbers say and how far to trust them, with --explain",
            "optional",
        ),
        "seconds": {
            "generate": ("number", "seconds"),
            "measure": ("number", "seconds"),
            "recover": ("number", "seconds"),
            "refine": ("number", "seconds", "optional"),
            "rank": ("number", "seconds"),
            "stability": ("number", "seconds", "optional"),
        },
        "expected": [("string", "stride demo: a document that states the fact"), "optional"],
        "found": ("boolean", "stride demo: whether such a document is on top", "optional"),
    },
    "stride.setting/1": {
        "schema": ("string", "stride.setting/1"),
        "key": ("string", "section and name, such as query.top"),
        "value": ("string or number or boolean or array or null", "null: what fits the index and model"),
        "source": ("string", '"default", "stride.yaml" or the name of a variable'),
    },
    "stride.report/1": {
        "schema": ("string", "stride.report/1"),
        "path": ("string", "the page that was written"),
        "queries": ("integer", "queries on it"),
        "bytes": ("integer", "its size"),
        "seconds": ("number", "seconds of the whole command"),
    },
    "stride.train/1": {
        "schema": ("string", "stride.train/1"),
        "index": ("string", "path of the index"),
        "fit": ("string", '"closed" or "sgd"'),
        "space": ("string", "operator space, or spaces joined by +"),
        "layer": ("integer", "residual spaces act after this many blocks"),
        "subsets": ("integer", "K"),
        "gate_size": ("integer", "gates of one operator, summed over its spaces"),
        "sketch": ("integer", "bits that are kept of every chunk's own gradient; 0: none"),
        "coverage": ("number", "share of the chunks that the fit has seen"),
        "step": ("number", "share of the gates at which exact measurement takes its differences"),
        "step_agreement": (
            "number",
            "Pearson correlation of exact and linear responses at that step; null for sgd",
        ),
        "loss": ("number", "closed: mean loss of the corpus; sgd: the last iteration's objective per subset"),
        "checkpoints": [
            {
                "path": ("string", "a further model that takes part: its directory or hub id"),
                "fingerprint": ("string", "SHA-256 of its weights, hex"),
                "space": ("string", "as above"),
                "layer": ("integer", "residual spaces act after this many of its blocks"),
                "step_agreement": ("number", "as above"),
                "loss": ("number", "as above"),
                "seconds": ("number", "load, fit and write"),
            }
        ],
        "seconds": {
            "load": ("number", "seconds"),
            "fit": ("number", "seconds"),
            "write": ("number", "seconds"),
        },
    },
    "stride.truth/1": {
        "schema": ("string", "stride.truth/1"),
        "index": ("string", "path of the index"),
        "subsets": ("integer", "random subsets of this alpha, in all"),
        "seeds": ("integer", "models retrained on each"),
        "own_seed": ("boolean", "from the model's own initial weights and order, instead of others"),
        "alpha": ("number", "share of the chunks in a subset"),
        "queries": ("integer", "queries whose losses were measured"),
        "trained": ("integer", "models trained by this command"),
        "reused": ("integer", "models that had been trained before"),
        "mean_loss": (
            "number",
            "mean over queries and retrained models, nats per scored token",
        ),
        "base_loss": ("number", "mean over queries of the index's own model, nats per scored token"),
        "seconds": ("number", "seconds of the whole command"),
    },
    **INDEX_RECORDS,
    **MODEL_RECORDS,
    **AUDIT_RECORDS,
    **EVALUATION_RECORDS,
    **SELECTION_RECORDS,
    **TUNING_RECORDS,
    **VERIFY_RECORDS,
}


def json_schema(name: str) -> dict[str, Any]:
    """One record's JSON Schema (draft 2020-12).

    Raises
    ------
    KeyError      no such record
    """
    schema = _object(RECORDS[name])
    schema["properties"]["schema"]["const"] = name
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": name, **schema}


def is_optional(field: Any) -> bool:
    """Whether a record may lack this key: its field ends in "optional"."""
    return isinstance(field, tuple | list) and field[-1] == "optional"


def _object(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {key: _value(field) for key, field in fields.items()},
        "required": [key for key, field in fields.items() if not is_optional(field)],
        "additionalProperties": False,
    }


def _value(field: Any) -> dict[str, Any]:
    if isinstance(field, dict):
        return _object(field)
    if isinstance(field, list):
        return {"type": "array", "items": _value(field[0])}
    kinds = field[0].split(" or ")
    if kinds == ["number"]:  # one that is not finite is written as null
        kinds = ["number", "null"]
    return {"type": kinds if len(kinds) > 1 else kinds[0], "description": field[1]}
