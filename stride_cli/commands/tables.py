"""Records as tables on a terminal, and the command to run next."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from stride_cli import output
from stride_cli.characters import one_line

if TYPE_CHECKING:
    from rich.text import Text


def print_table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, stderr: bool = False
) -> None:
    """A plain table on stdout (or stderr); the first column is text, the others are numbers."""
    from rich.table import Table

    table = Table(title=text(title), title_justify="left", box=None, pad_edge=False, show_edge=False)
    for number, column in enumerate(columns):
        table.add_column(text(column), justify="right" if number else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(text, row))
    output.console(stderr=stderr).print(table)


def text(found: str) -> Text:
    """Make the text of a cell or a title: as it is, whatever brackets are in it, and safe to show."""
    from rich.text import Text

    return Text(one_line(found))


def print_tokens(shown: Mapping[str, Any], form: Mapping[str, Any] | None) -> None:
    """Print tokens, the scored ones in green and brackets, and the form that they are in."""
    from rich.text import Text

    line = Text()
    for piece, scored in zip(shown["pieces"] or map(str, shown["ids"]), shown["scored"], strict=True):
        written = one_line(piece).replace(" ", "·") or "∅"
        line.append(f"[{written}]" if scored else written, style="green" if scored else "dim")
        line.append("" if shown["pieces"] else " ")
    output.console().print(line)
    about = f"{sum(shown['scored'])} of {len(shown['ids'])} tokens are scored, in brackets"
    if form:
        about += f"; form: {form['name']}, by the {form['source']}"
        about += "".join(f", {key} {form[key]!r}" for key in ("between", "clock") if form[key] is not None)
    output.console().print(text(about), style="dim")


def number(value: float | None, form: str = ".3f") -> str:
    """A number, or – for none."""
    return "–" if value is None else format(value, form)


def size(value: float | None) -> str:
    """Bytes for people: ``3.4 MB``."""
    if value is None:
        return "–"
    for unit in ("B", "kB", "MB", "GB"):
        if abs(value) < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} TB"


def show_record(record: Mapping[str, Any], json: bool | None, *, title: str) -> None:
    """A record as JSON, or as a table of names and values for people."""
    if output.wants_json(json):
        output.emit(record)
        return
    from rich.table import Table

    table = Table(title=text(title), show_header=False, title_justify="left")
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _flat(record):
        table.add_row(text(name), text(value))
    output.console().print(table)


def _flat(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in record.items():
        label = prefix + name.replace("_", " ")
        if name == "schema":
            continue
        if isinstance(value, Mapping):
            yield from _flat(value, f"{label}: ")
        elif isinstance(value, list) and any(isinstance(each, Mapping) for each in value):
            for number, each in enumerate(value, 1):
                yield from _flat(each, f"{label} {number}: ")
        else:
            yield label, _shown(value, is_size="bytes" in label)


def _shown(value: Any, is_size: bool) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,} ({size(value)})" if is_size and value >= 10_000 else f"{value:,}"
    return f"{value:,.4g}" if isinstance(value, float) else str(value)


def next_step(*words: str, why: str = "next") -> None:
    """Say, on stderr, the command to run next, such that it can be pasted: paths and patterns are quoted.

    Parameters
    ----------
    words : of the command, each an argument of its own; "…" stands for what only the user knows
    why : what stands before it
    """
    pasted = (f'"{word}"' if word == "…" else shlex.quote(word) for word in words)
    output.note(f"{why}: {' '.join(pasted)}")
