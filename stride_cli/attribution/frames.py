"""Answers as one row a hit: a pandas frame, CSV lines, and the table that a notebook shows."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import IO, Any

from stride_cli.characters import cell, html_text, printable, shortened
from stride_cli.errors import require_extra
from stride_cli.schema import json_schema
from stride_cli.schema.answer_records import AnswerOfHit

Row = dict[str, Any]
_PASSAGE = 240  # characters of a passage in a notebook
# stated, because a column may be empty, and pandas could not infer its type
_DTYPES = {"string": "string", "number": "float64", "integer": "int64", "boolean": "boolean"}
_VERDICTS = {
    "clear": "the model knows this, and a document taught it",
    "weak": "the model knows this, but no document stands out: single none of them out",
    "guessing": "the model is no surer than after unrelated prompts: what is listed is no source",
}
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
    """Yield one row a hit of a ``stride.answer/1`` record, opposers last.

    A key that both answer and hit have is the hit's. Infinite and undefined numbers are None.

    Args:
        answer: The record.
        number: The answer's number, from 1.
    """
    of_answer = {key: answer.get(key) for key in AnswerOfHit.__annotations__}
    for name in ("hits", "opposers"):
        for hit in answer[name]:
            row = {**of_answer, **hit, "list": name, "answer": number}
            yield {key: _finite(row.get(key)) for key in hit_columns()}


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def frame(answer: Mapping[str, Any]) -> Any:
    """Make a pandas DataFrame of a ``stride.answer/1`` record: one row a hit, opposers last.

    Raises:
        MissingExtraError: pandas is not installed.
    """
    try:
        import pandas
    except ImportError:
        raise require_extra("pandas", "frames") from None
    rows = list(hit_rows(answer))
    return pandas.DataFrame(
        {
            name: pandas.Series([row[name] for row in rows], dtype=dtype)
            for name, dtype in hit_columns().items()
        }
    )


class CsvTable:
    """Writes answers as CSV: a header, then one line a hit; an empty cell is None.

    Text that a spreadsheet would run as a formula gets an apostrophe in front. Characters that would steer a
    terminal are escaped.
    """

    def __init__(self, out: IO[str]) -> None:
        self._out = out
        self._number = 0
        self._writer = csv.DictWriter(out, list(hit_columns()), lineterminator="\n")
        self._writer.writeheader()

    def add(self, answer: Mapping[str, Any]) -> None:
        """Write the hits of a ``stride.answer/1`` record."""
        self._number += 1
        for row in hit_rows(answer, self._number):
            self._writer.writerow(
                {
                    name: cell(printable(value)) if isinstance(value, str) else value
                    for name, value in row.items()
                }
            )
        self._out.flush()


def html_table(answer: Mapping[str, Any]) -> str:
    """Write a ``stride.answer/1`` record as HTML: the verdict, then its tables; all text is escaped."""
    word = answer.get("verdict")
    parts = [f"<p><b>{word.capitalize()}</b>: {_VERDICTS[word]}.</p>"] if word in _VERDICTS else []
    unit = "nats" if answer.get("unit") == "nats" else "relative"
    parts.append(f"<p>{html_text(answer['prompt'])}<b>{html_text(answer['response'])}</b></p>")
    for title, hits in (("supports", answer["hits"]), ("opposes", answer["opposers"])):
        if hits:
            head = _row("th", ["", title, "share", f"influence ({unit})", "passage"])
            parts.append(f"<table><thead>{head}</thead><tbody>{_hit_rows(hits)}</tbody></table>")
    return "".join(parts)


def _hit_rows(hits: Sequence[Mapping[str, Any]]) -> str:
    rows, above = [], True
    for hit in hits:
        if hit["sign"] == "supports" and above and hit.get("above_line") is False:
            above = False
            rows.append(
                '<tr><td colspan="5"><i>below: no stronger, for its loss, than what unrelated prompts get'
                "</i></td></tr>"
            )
        name = hit["document"] + (f" ({hit['label']})" if "label" in hit else "")
        share = "" if hit["backfilled"] else f"{hit['share']:.0%}"
        influence = "by correlation only" if hit["backfilled"] else f"{hit['influence']:+.3g}"
        passage = shortened(hit["passage"], _PASSAGE)
        rows.append(_row("td", [f"{hit['rank']:g}", name, share, influence, passage]))
    return "".join(rows)


def _row(tag: str, cells: Sequence[str]) -> str:
    return "<tr>" + "".join(f'<{tag} style="{_STYLE}">{html_text(each)}</{tag}>' for each in cells) + "</tr>"
