"""Answers as one row a hit: a pandas frame, and the table that a notebook shows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from stride_cli.characters import html_text, shortened
from stride_cli.errors import required
from stride_cli.schema import json_schema
from stride_cli.schema.answer_records import VERDICTS, AnswerOfHit, sections

Row = dict[str, Any]
_PASSAGE = 240  # characters of a passage in a notebook
# stated, because a column may be empty, and pandas could not infer its type
_DTYPES = {"string": "string", "number": "float64", "integer": "int64", "boolean": "boolean"}
_STYLE = "text-align:left;vertical-align:top"


@cache
def hit_columns() -> dict[str, str]:
    """Map the columns of a hit, as ``stride schema stride.hit_row/1`` describes them, to pandas dtypes."""
    columns = {}
    for name, part in json_schema("stride.hit_row/1")["properties"].items():
        kinds = [part["type"]] if isinstance(part["type"], str) else part["type"]
        columns[name] = "Int64" if kinds == ["integer", "null"] else _DTYPES[kinds[0]]
    del columns["schema"]
    return columns


def hit_rows(answer: Mapping[str, Any], number: int = 1) -> Iterator[Row]:
    """Yield one row a hit of a ``stride.answer/1`` record, the number-th from 1 on; opposers last.

    A key that both answer and hit have is the hit's. Infinite and undefined numbers are None.
    """
    of_answer = {key: answer.get(key) for key in AnswerOfHit.__annotations__}
    for hit in (*answer["hits"], *answer["opposers"]):
        row = {**of_answer, **hit, "answer": number}
        known = {key: each for key, each in row.items() if not isinstance(each, float) or math.isfinite(each)}
        yield {key: known.get(key) for key in hit_columns()}


def frame(answer: Mapping[str, Any]) -> Any:
    """Make a pandas DataFrame of a ``stride.answer/1`` record: one row a hit, opposers last.

    What is the answer's own, its prompt and the like, is in the frame's ``attrs``.

    Raises:
        MissingExtraError: pandas is not installed.
    """
    pandas = required("pandas", "frames")
    rows, shared = list(hit_rows(answer)), AnswerOfHit.__annotations__
    columns = {name: dtype for name, dtype in hit_columns().items() if name not in shared}
    made = pandas.DataFrame(
        {name: pandas.Series([row[name] for row in rows], dtype=dtype) for name, dtype in columns.items()}
    )
    made.attrs = {name: answer.get(name) for name in shared if name in answer}
    return made


def html_table(answer: Mapping[str, Any]) -> str:
    """Write a ``stride.answer/1`` record as HTML: the verdict, then its tables; all text is escaped."""
    word, unit = answer.get("verdict"), answer.get("unit")
    parts = [f"<p><b>{word.capitalize()}</b>: {VERDICTS[word].meaning}.</p>"] if word in VERDICTS else []
    said = f"<b>{html_text(answer['response'])}</b>{'…' * bool(answer.get('cut'))}"
    parts.append(f"<p>{html_text(answer['prompt'])}{said}</p>")
    for heading, hits, quiet in sections(answer):
        rows = [_row("th", ["", heading, *([] if quiet else ["share", "influence"]), "passage"])]
        for hit in hits:
            name = hit.get("title", hit["document"]) + (f" ({hit['label']})" if "label" in hit else "")
            name += " (the model was never trained on it)" if hit.get("trained") is False else ""
            share = "" if hit["backfilled"] else share_text(hit["share"])
            numbers = [] if quiet else [share, influence_text(hit, unit)]
            rows.append(_row("td", [f"{hit['rank']:g}", name, *numbers, shortened(hit["passage"], _PASSAGE)]))
        parts.append(f"<table>{''.join(rows)}</table>" if hits else f"<p>{heading}</p>")
    return "".join(parts)


def share_text(share: float) -> str:
    """Show a share in whole percents, as everywhere."""
    return f"{share:.0%}" if share >= 0.005 else "<1%"


def influence_text(hit: Mapping[str, Any], unit: str | None) -> str:
    """Show a document's influence: three digits, in the record's unit."""
    if not (value := hit["influence"]):
        return "by correlation only" if hit.get("backfilled") else "–"
    shown = f"{value:+,.0f}" if abs(value) >= 999.5 else f"{value:+#.3g}".rstrip(".")
    if unit == "nats" and hit.get("high") is not None:
        return f"{shown} nats ({hit['low']:+.2g} … {hit['high']:+.2g})"
    return f"{shown} nats" if unit == "nats" else shown


def _row(tag: str, cells: Sequence[str]) -> str:
    return "<tr>" + "".join(f'<{tag} style="{_STYLE}">{html_text(each)}</{tag}>' for each in cells) + "</tr>"
