"""Answers in Python: as a pandas frame, and as what a notebook shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stride_cli.characters import html_text, shortened
from stride_cli.errors import require_extra
from stride_cli.formats.columns import Column, hit_columns, hit_rows

_PASSAGE = 240  # characters of a passage that a notebook shows
# whole columns may be empty, so that their types do not follow from what is in them
_DTYPES = {str: "string", float: "float64", int: "int64", bool: "boolean"}
_VERDICTS = {
    "clear": "the model knows this, and a document taught it",
    "weak": "the model knows this, but no document stands out: single none of them out",
    "guessing": "the model is no surer than after unrelated prompts: what is listed is no source",
}
_STYLE = "text-align:left;vertical-align:top"


def _dtype(column: Column) -> str:
    return "Int64" if column.kind is int and column.optional else _DTYPES[column.kind]


def frame(answer: Mapping[str, Any]) -> Any:
    """A ``stride.answer/1`` record as a pandas DataFrame: one row a hit, opposers last.

    Columns as of ``stride query --format parquet``: ``stride schema stride.hit_row/1``.

    Raises
    ------
    MissingExtraError       pandas is not installed
    """
    try:
        import pandas
    except ImportError:
        raise require_extra("pandas", "frames") from None
    rows = hit_rows(answer)
    columns = {
        column.name: pandas.Series([row[column.name] for row in rows], dtype=_dtype(column))
        for column in hit_columns()
    }
    return pandas.DataFrame(columns)


def html_table(answer: Mapping[str, Any]) -> str:
    """A ``stride.answer/1`` record as a small table of HTML, the verdict first; all text in it is escaped."""
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
