"""Draw what pages of comparisons share: intervals of methods, labels that do not cover each other."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from stride_cli.characters import html_text, shortened
from stride_cli.report.drawing import WIDTH, Scale, html_page, label, svg, ticks_for

COLOURS = 8  # --c0 … --c7
_LEFT, _RIGHT = 150, 30  # room for the methods' names
# nine columns fit a screen of 1400; on a phone plots are as wide as it, and their words larger
_WIDE = """
body { max-width: 70rem; } th { white-space: normal; vertical-align: bottom; }
td:first-child { white-space: normal; overflow-wrap: break-word; min-width: 9rem; max-width: 22rem; }
.warning { color: var(--c1); } .plot svg { min-width: 46rem; } .found { font-size: 1.15rem; }
@media (max-width: 48rem) { .plot svg { min-width: 0; } .plot svg text { font-size: 18px; } }
"""


def apart(
    heights: list[float], places: list[float], lowest: float, gap: float = 13, reach: float = 110
) -> list[float]:
    """Move labels down where one would cover another, and up again from `lowest`; returns their heights."""
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


def scrolled(name: str, wide: str) -> str:
    """Put what may be wider than a screen in a box that scrolls, by keyboard too."""
    return f'<div class="wide plot" role="region" aria-label="{html_text(name)}" tabindex="0">{wide}</div>'


def interval_plot(
    found: Sequence[tuple[str, float, float, float]],
    colours: Mapping[str, str],
    name: str,
    *,
    ceiling: tuple[float, str] | None = None,
) -> str:
    """Draw a dot and its interval for each method, best first.

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


def page(title: str, parts: Iterable[str]) -> str:
    """Frame the parts of a page under its title, a plain text."""
    title = html_text(title)
    return html_page(title, [f"<h1>{title}</h1>", *parts], style=_WIDE)


def table(name: str, heads: Sequence[str], rows: Iterable[str]) -> str:
    """Lay out rows of HTML cells below their heads."""
    first = "".join(f"<th>{head}</th>" for head in heads)
    return scrolled(name, "<table>" + "".join(f"<tr>{row}</tr>" for row in [first, *rows]) + "</table>")


def cells(found: Iterable[str]) -> str:
    return "".join(f"<td>{cell}</td>" for cell in found)


def failure_cell(error: str, width: int) -> str:
    return f'<td class="error" colspan="{width}">{html_text(error)}</td>'
