"""What every HTML page here shares: colours for light and dark, plots as SVG, writing a file whole."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from stride_cli.characters import html_text, shortened
from stride_cli.errors import UsageError

WIDTH = 720
COLOURS = 8  # --c0 … --c7
_LEFT, _RIGHT = 150, 30  # of an interval plot: room for the methods' names

STYLE = """
:root { color-scheme: light dark; --paper: #ffffff; --ink: #1f2328; --faint: #59636e; --rule: #d1d9e0;
  --c0: #0b62c4; --c1: #b35900; --c2: #00795c; --c3: #b0306a; --c4: #6b4fc8; --c5: #8a6d00; --c6: #00778f;
  --c7: #a4342b; }
@media (prefers-color-scheme: dark) { :root { --paper: #0d1117; --ink: #e6edf3; --faint: #9aa4af;
  --rule: #30363d; --c0: #6cb0ff; --c1: #ffa657; --c2: #56d4a8; --c3: #ff8fc0; --c4: #b9a2ff; --c5: #e3c04c;
  --c6: #5fd0e6; --c7: #ff8f85; } }
body { background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; max-width: 62rem;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; margin-bottom: 0; } h2 { font-size: 1.05rem; margin: 2.2rem 0 .3rem; }
p { margin: .3rem 0; max-width: 46rem; } .faint { color: var(--faint); }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums;
  white-space: nowrap; } th, td { padding: .3rem .8rem .3rem 0; text-align: right;
  border-bottom: 1px solid var(--rule); } th:first-child, td:first-child { text-align: left; }
th { font-weight: 600; } td.error { text-align: left; white-space: normal; color: var(--faint); }
svg { width: 100%; max-width: 46rem; height: auto; display: block; } svg text { fill: var(--ink);
  font: 12px system-ui, sans-serif; } svg .faint { fill: var(--faint); } svg .rule { stroke: var(--rule); }
svg .zero { stroke: var(--faint); } svg .ceiling { stroke: var(--faint); stroke-dasharray: 5 4; }
"""


class Scale:
    """A linear map from values to positions."""

    def __init__(self, low: float, high: float, start: float, stop: float) -> None:
        self._low, self._start = low, start
        self._factor = (stop - start) / (high - low)

    def __call__(self, value: float) -> float:
        return self._start + (value - self._low) * self._factor


def ticks_for(low: float, high: float) -> list[float]:
    """Round numbers that enclose [low, high], about five."""
    spread = max(high - low, 1e-3)
    step = 10.0 ** math.floor(math.log10(spread / 4))
    step *= next(factor for factor in (1, 2, 2.5, 5, 10) if spread / (step * factor) <= 6)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(number * step, 10) for number in range(first, max(last, first + 1) + 1)]


def apart(
    heights: list[float], places: list[float], lowest: float, gap: float = 13, reach: float = 110
) -> list[float]:
    """Heights of labels, moved down where one would cover another, and up again from `lowest`."""
    placed = list(heights)
    for direction in (1, -1):  # away from the labels above, then from those below
        done: list[int] = []
        for number in sorted(range(len(placed)), key=lambda n: direction * placed[n]):
            near = [other for other in done if abs(places[other] - places[number]) < reach]
            if direction > 0:
                placed[number] = max([placed[number], *(placed[other] + gap for other in near)])
            else:
                placed[number] = min([placed[number], lowest, *(placed[other] - gap for other in near)])
            done.append(number)
    return placed


def log_line(values: np.ndarray, heights: np.ndarray, across: Scale, down: Scale) -> str:
    """The `d` of an SVG path through the points (log10 of each value, its height)."""
    points = (f"{across(math.log10(s)):.1f} {down(m):.1f}" for s, m in zip(values, heights, strict=True))
    return "M" + " L".join(points)


def label(x: float, y: float, text: str, anchor: str, *, faint: bool = False) -> str:
    """Text in a plot; `anchor` is "start", "middle" or "end"."""
    kind = ' class="faint"' if faint else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{kind}>{html_text(text)}</text>'


def svg(height: float, marks: Sequence[str], name: str, *, width: float = WIDTH) -> str:
    """A plot of `width` by `height` from its marks; `name` is what a screen reader says."""
    return (
        f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{html_text(name)}">'
        + "".join(marks)
        + "</svg>"
    )


def scrolled(name: str, wide: str) -> str:
    """What may be wider than a screen, in a box that scrolls, by keyboard too."""
    return f'<div class="wide plot" role="region" aria-label="{html_text(name)}" tabindex="0">{wide}</div>'


def interval_plot(
    found: Sequence[tuple[str, float, float, float]],
    colours: Mapping[str, str],
    name: str,
    *,
    ceiling: tuple[float, str] | None = None,
) -> str:
    """A dot and its interval for each method, best first.

    Parameters
    ----------
    found : method, mean, low and high of each; of one whose interval is not known (NaN) the dot alone
    colours : by method
    name : what a screen reader says
    ceiling : a value that is marked, and what it is called
    """
    found = sorted(found, key=lambda each: -each[1])
    values = [value for _, *three in found for value in three if math.isfinite(value)] + [0.0]
    if ceiling is not None:
        values.append(ceiling[0])
    ticks = ticks_for(min(values), max(values))
    height = 30 * len(found) + 50
    scale = Scale(ticks[0], ticks[-1], _LEFT, WIDTH - _RIGHT)
    marks = []
    for tick in ticks:
        x, kind = scale(tick), "zero" if abs(tick) < 1e-9 else "rule"
        marks.append(f'<line class="{kind}" x1="{x:.1f}" x2="{x:.1f}" y1="10" y2="{height - 35}"/>')
        marks.append(label(x, height - 18, f"{tick:g}", "middle", faint=True))
    if ceiling is not None:
        x = scale(ceiling[0])
        marks.append(
            f'<line class="ceiling" x1="{x:.1f}" x2="{x:.1f}" y1="10" y2="{height - 35}"/>'
            + label(x, height - 4, ceiling[1], "end" if x > WIDTH - 100 else "middle", faint=True)
        )
    for row, (method, mean, low, high) in enumerate(found):
        y, colour = 28 + 30 * row, colours[method]
        tip, span = f"{method}: {mean:.3f}", ""
        if math.isfinite(low) and math.isfinite(high):
            tip += f", {low:.3f} … {high:.3f}"
            span = (
                f'<line x1="{scale(low):.1f}" x2="{scale(high):.1f}" y1="{y}" y2="{y}" '
                f'style="stroke:{colour}" stroke-width="3" stroke-opacity=".55" stroke-linecap="round"/>'
            )
        marks.append(
            f"<g><title>{html_text(tip)}</title>{span}"
            f'<circle cx="{scale(mean):.1f}" cy="{y}" r="5" style="fill:{colour}"/></g>'
            + label(_LEFT - 10, y + 4, shortened(method), "end")
        )
    return svg(height, marks, name)


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


def write_whole(path: Path, page: str) -> None:
    """Write the page at `path`, whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_text(page, encoding="utf-8")
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
