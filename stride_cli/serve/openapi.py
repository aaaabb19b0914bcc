"""The interface as OpenAPI 3.1: what requests may hold derives from the options, answers from the records."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stride_cli import __version__
from stride_cli.options import Entry, entries
from stride_cli.prove.options import HitOptions
from stride_cli.schema import json_schema
from stride_cli.serve.questions import OPTIONS, PASSAGES

CHECKS = ("seeds", "random", "effect")  # of `HitOptions`, that a request may give
_JSON_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number"}
_TEXT = {"type": "string"}


def describe(routes: Mapping[str, Mapping[str, str]]) -> dict[str, Any]:
    """The document.

    Parameters
    ----------
    routes : path → method, in lower case → what it does, in words
    """
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "stride serve",
            "version": __version__,
            "description": "Which training documents made this language model say that? Every request but "
            "that of the page needs the header Authorization: Bearer TOKEN, of the URL that is told at the "
            "start. What is wrong comes back as a stride.error/1.",
        },
        "security": [{"token": []}],
        "components": {"securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
        "paths": {
            path: {method: _operation(path, method, about) for method, about in methods.items()}
            for path, methods in routes.items()
        },
    }


def _operation(path: str, method: str, about: str) -> dict[str, Any]:
    kind, schema = _ANSWERS.get(path, ("application/json", None))
    content = {kind: {} if schema is None else {"schema": json_schema(schema)}}
    if path == "/query":
        lines = "A stride.answer/1 a line for 'prompts', stride.bad_input/1 for those without an answer."
        content["application/x-ndjson"] = {"schema": {"type": "string", "description": lines}}
    operation: dict[str, Any] = {
        "summary": about,
        "responses": {
            "202" if (path, method) == ("/verify", "post") else "200": {
                "description": about,
                "content": content,
            },
            "default": {
                "description": "what is wrong, and what to do",
                "content": {"application/json": {"schema": json_schema("stride.error/1")}},
            },
        },
    }
    if method == "post":
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": _body(path)}},
        }
    parameters = _PARAMETERS.get(path, []) if method != "post" else []
    if parameters:
        operation["parameters"] = [
            {"name": name, "in": place, "required": required, "schema": _TEXT, "description": meaning}
            for name, place, required, meaning in parameters
        ]
    if path in ("/", "/page.css", "/page.js", "/icon.svg"):
        operation["security"] = []
    return operation


_ANSWERS: dict[str, tuple[str, str | None]] = {
    "/": ("text/html", None),
    "/page.css": ("text/css", None),
    "/page.js": ("text/javascript", None),
    "/icon.svg": ("image/svg+xml", None),
    "/query": ("application/json", "stride.answer/1"),
    "/passages": ("application/json", "stride.passages/1"),
    "/tokens": ("application/json", "stride.tokens/1"),
    "/indexes": ("application/json", "stride.indexes/1"),
    "/document": ("application/json", "stride.document/1"),
    "/verify": ("application/json", "stride.verification/1"),
    "/verify/{id}": ("text/event-stream", None),
}
_PARAMETERS: dict[str, list[tuple[str, str, bool, str]]] = {
    "/": [("token", "query", True, "of the URL that is told at the start")],
    "/document": [
        ("id", "query", True, "of the document"),
        ("index", "query", False, "name of the index; may be left out where there is one"),
    ],
    "/verify/{id}": [("id", "path", True, "of the job")],
}


def _body(path: str) -> dict[str, Any]:
    """JSON Schema of a request's object."""
    prompt = {
        "prompt": {**_TEXT, "description": "what the model is asked"},
        "response": {**_TEXT, "description": "attribute this continuation, not the model's own"},
        "span": {**_TEXT, "description": "attribute only this part of the response"},
        "instead": {
            **_TEXT,
            "description": "why the response and not this? Influences are on the log-odds of the token where "
            "they part",
        },
        "id": {"type": ["string", "integer"], "description": "comes back with the answer"},
    }
    properties: dict[str, Any] = {
        **prompt,
        "index": {**_TEXT, "description": "name of the index; may be left out where there is one"},
        **{name: _option(entry) for name, entry in OPTIONS.items()},
    }
    required = ["prompt"]
    if path == "/query":
        many = {"type": "object", "properties": prompt, "required": ["prompt"], "additionalProperties": False}
        properties |= {
            "prompts": {
                "type": "array",
                "items": {"anyOf": [_TEXT, many]},
                "description": "several, in place of 'prompt': the answer is JSON Lines",
            },
            "explain": {"type": "boolean", "description": "two sentences with each answer"},
            "alone": {
                "type": "boolean",
                "description": "not in one pass with other requests: the last digits of numbers are those "
                "that stride query gives",
            },
        }
        properties["passages"] = {
            **_option(PASSAGES),
            "default": PASSAGES.default,
            "description": "a hit's passage: carrying, the sentence that carries its influence, where chunks "
            "are read, which takes a pass through the hits; like, the sentence most like the query, at once; "
            "none. POST /passages gives the first afterwards",
        }
        required = []
    elif path == "/document":
        properties["document"] = {**_TEXT, "description": "id of the document"}
        required = ["prompt", "document"]
    elif path == "/export":
        properties["format"] = {"type": "string", "enum": ["html", "csv", "json"]}
        required = ["prompt", "format"]
    elif path == "/verify":
        ids = {"type": "array", "items": _TEXT, "description": "ids; default: the answer's top documents"}
        checks = {name: _option(entry) for name, entry in entries(HitOptions).items() if name in CHECKS}
        properties |= {"documents": ids, **checks}
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def _option(entry: Entry) -> dict[str, Any]:
    kinds = [_JSON_TYPES[kind] for kind in entry.kinds if kind in _JSON_TYPES]
    found: dict[str, Any] = {
        "type": kinds[0] if len(kinds) == 1 else kinds,
        "description": _positive(entry),
    }
    about = entry.about
    limits = {"minimum": about.low, "maximum": about.high, "exclusiveMinimum": about.above}
    found |= {key: value for key, value in limits.items() if value is not None}
    if about.choices:
        found["enum"] = list(about.choices)
    return found


def _positive(entry: Entry) -> str:
    """What an option says; of a switch that sets it to false, that it does."""
    return f"false: {entry.about.help}" if entry.negated else entry.about.help
