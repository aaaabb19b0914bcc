"""Draw what every HTML page here shares: colours for light and dark, plots as SVG."""

from __future__ import annotations

import math
import os
import shlex
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from stride_cli.characters import html_text, page_policy
from stride_cli.errors import UsageError
from stride_cli.schema.answer_records import VERDICTS
from stride_cli.version import __version__

if TYPE_CHECKING:
    from index_format.reader import Index

WIDTH = 720
_DIGITS = 16  # of a digest that tells one from another


def asset(name: str) -> str:
    """Read a style or a script that pages hold."""
    return files("stride_cli.report").joinpath("assets", name).read_text(encoding="utf-8")


STYLE = asset("style.css")


def verdict_style() -> str:
    """Write the colours of verdicts as CSS: `--verdict` of an element with the word as its class."""
    light = "".join(f".{word} {{ --verdict: {look.light}; }}\n" for word, look in VERDICTS.items())
    dark = "".join(f".{word} {{ --verdict: {look.dark}; }}\n" for word, look in VERDICTS.items())
    return f"{light}@media (prefers-color-scheme: dark) {{\n{dark}}}\n"


def provenance(index: Index | None, command: Sequence[str] | None = None) -> list[tuple[str, str]]:
    """List what makes a page evidence of something: index, model, corpus, version, date and command.

    Parameters
    ----------
    index : that was asked; None: it is not known
    command : that makes the page again, in words (none: it is not told); default: the one that is running
    """
    rows = []
    if index is not None:
        prints, config = index.attributes["fingerprints"], index.attributes.get("config") or {}
        sources = ", ".join(map(str, config.get("sources") or ()))
        rows += [
            ("index", f"{index.path.name}, {index.n_documents:,} documents, {index.digest[:_DIGITS]}"),
            ("model", f"{index.attributes.get('model_path')}, {prints['model'][:_DIGITS]}"),
            ("corpus", f"{sources or 'not named'}, {prints.get('corpus', '')[:_DIGITS]}"),
        ]
    made = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    again = shlex.join(["stride", *sys.argv[1:]] if command is None else command)
    return [*rows, ("made", f"{made}, by stride {__version__}"), *([("again", again)] if again else [])]


def about_page(rows: Sequence[tuple[str, str]]) -> str:
    """Write the end of a page, from `provenance`."""
    listed = "".join(f"<dt>{html_text(name)}</dt><dd>{html_text(told)}</dd>" for name, told in rows)
    return f'<footer class="faint"><h2>About this page</h2><dl>{listed}</dl></footer>' if rows else ""


def html_page(title: str, body: Sequence[str], *, style: str = "", script: str = "") -> str:
    """Write a page that fetches nothing and runs its own script alone.

    Parameters
    ----------
    title, body : as HTML
    style, script : beside `STYLE`; the script runs when the page is there
    """
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f'<meta http-equiv="Content-Security-Policy" content="{page_policy(script)}">',
        f'<link rel="icon" href="data:,"><title>{title}</title><style>{STYLE}{style}</style></head><body>',
        *body,
        f"<script>{script}</script></body></html>" if script else "</body></html>",
    ]
    return "\n".join([*parts, ""])


class Scale:
    """A linear map from values to positions."""

    def __init__(self, low: float, high: float, start: float, stop: float) -> None:
        self._low, self._start = low, start
        self._factor = (stop - start) / (high - low)

    def __call__(self, value: float) -> float:
        return self._start + (value - self._low) * self._factor


def ticks_for(low: float, high: float) -> list[float]:
    """Choose round numbers that enclose [low, high], about five."""
    spread = max(high - low, 1e-3)
    step = 10.0 ** math.floor(math.log10(spread / 4))
    step *= next(factor for factor in (1, 2, 2.5, 5, 10) if spread / (step * factor) <= 6)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(number * step, 10) for number in range(first, max(last, first + 1) + 1)]


def label(x: float, y: float, text: str, anchor: str, *, faint: bool = False) -> str:
    """Put text in a plot; `anchor` is "start", "middle" or "end"."""
    kind = ' class="faint"' if faint else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{kind}>{html_text(text)}</text>'


def svg(height: float, marks: Sequence[str], name: str, *, width: float = WIDTH) -> str:
    """Make a plot of `width` by `height` from its marks; `name` is what a screen reader says."""
    return (
        f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{html_text(name)}">'
        + "".join(marks)
        + "</svg>"
    )


def check_place(path: Path) -> None:
    """Refuse a place where no page can be written, before work is done for it.

    Raises
    ------
    UsageError      its directory does not exist, it is a directory itself, or writing there is not allowed
    """
    parent = path.resolve().parent
    if not parent.is_dir():
        raise UsageError(f"there is no directory '{path.parent}'", fix=f"mkdir -p {path.parent}")
    if path.is_dir():
        raise UsageError(f"'{path}' is a directory (expected a file to write)", fix=f"try {path}/report.html")
    if not os.access(parent, os.W_OK):
        raise UsageError(f"no permission to write in '{path.parent}'", fix="give another place")
