"""Draw records for the pages of docs/, as SVG: the quality of methods on three suites, forecasts in nats."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from stride_cli.report.drawing import Scale, label
from tests.benchmarks import figures

_FRONTIER = 360
_WIDTH, _TOP, _LEFT, _RIGHT, _ROW = 760, 44, 200, 70, 22
_STYLE = """
text { font: 12px system-ui, sans-serif; fill: #1f2328; } .faint { fill: #59636e; }
.title { font-weight: 600; }
.c0 { fill: #0b62c4; stroke: #0b62c4; } .c1 { fill: #b35900; stroke: #b35900; } .rule { stroke: #d1d9e0; }
.line { fill: none; stroke-width: 2; } rect { stroke: none; } .paper { fill: #ffffff; }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3; } .faint { fill: #9aa4af; }
.paper { fill: #0d1117; }
.c0 { fill: #6cb0ff; stroke: #6cb0ff; } .c1 { fill: #ffa657; stroke: #ffa657; } .rule { stroke: #30363d; } }
"""

Record = dict[str, Any]
Bar = tuple[str, float, str, str]
"""What it is, its value, the text beside it, its colour class."""


def quality() -> str:
    """LDS of the README's five methods, a panel for each of its three suites."""
    panels = []
    for heading, suite in figures.BRIEF:
        bars: list[Bar] = []
        for name, specs in figures.FIVE:
            if found := figures.cell(specs, suite):
                bars.append((name.replace("`", ""), max(found[0], 0.0), found[1], "c1" if bars else "c0"))
        panels.append(_bars(f"{heading}: LDS", bars))
    return _stacked("Quality of five methods", panels)


def nats(records: Sequence[Record]) -> str:
    """Measured over forecast rises of losses when documents are left out: every pair of a query and a removed
    set where the record has it, else the line through them; a panel for each kind of model."""
    panels = []
    records = [each for each in records if each.get("form") != "chat"]  # of which the model knows none
    for title, ceiling in (("Trained from scratch", True), ("Fine-tuned", False)):
        of = [each for each in records if (each["scale"].get("link") == "ceiling") == ceiling]
        found = {each["what"]: each for each in of if each["what"] in ("own", "all")}
        if found:
            panels.append(_measured(title, found["own"], found["all"]))
    return _stacked("Forecast and measured rises of losses", panels)


def _measured(title: str, own: Record, every: Record) -> tuple[float, list[str]]:
    """One panel; in colour what was left out for the query itself."""
    theirs, others = own.get("points", []), every.get("points", [])
    mean = [own["mean_predicted"], own["mean_measured"]]
    most = max(max(point) for point in [*others, *theirs, mean, [2 * value for value in mean]])
    least = [min([0.0, *(point[axis] for point in others)]) for axis in (0, 1)]
    across, down = Scale(least[0], most, 60, _WIDTH - 150), Scale(least[1], most, _FRONTIER - 40, _TOP)
    slope = f"{figures.figure(own['slope'], 2)} ± {figures.figure(own['error'], 2)}"
    marks = [_title(f"{title}: measured over forecast rise, nats a token; slope {slope}")]
    step = 10.0 ** math.floor(math.log10(most))
    step = step if most / step > 4 else step / 2 if most / step > 2 else step / 4
    for number in range(int(most / step) + 1):
        value = number * step
        marks.append(_rule(60, _WIDTH - 150, down(value)))
        marks.append(label(52, down(value) + 4, f"{value:g}", "end", faint=True))
        marks.append(label(across(value), _FRONTIER - 18, f"{value:g}", "middle", faint=True))
    marks.append(_line("rule", 0, 0, most, most, across, down))
    marks.append(label(across(most) + 6, down(most) + 12, "as forecast", "start", faint=True))
    marks.append(_line("line c1", 0, 0, most, min(most, own["slope"] * most), across, down))
    for colour, points in (("c0", others), ("c1", theirs)):
        marks += [
            f'<circle class="{colour}" cx="{across(x):.1f}" cy="{down(y):.1f}" r="2.5"/>' for x, y in points
        ]
    if not theirs:
        marks.append(f'<rect class="c1" x="{across(mean[0]) - 4:.1f}" y="{down(mean[1]) - 4:.1f}" ')
        marks[-1] += 'width="8" height="8"/>'
        marks.append(label(across(mean[0]) + 9, down(mean[1]) + 14, f"mean of {own['pairs']}", "start"))
    return _FRONTIER, marks


def _line(kind: str, x: float, y: float, right: float, top: float, across: Scale, down: Scale) -> str:
    return (
        f'<line class="{kind}" x1="{across(x):.1f}" y1="{down(y):.1f}" '
        f'x2="{across(right):.1f}" y2="{down(top):.1f}"/>'
    )


def _stacked(what: str, panels: Sequence[tuple[float, list[str]]]) -> str:
    marks, top = [], 0.0
    for height, inside in panels:
        marks.append(f'<g transform="translate(0 {top:g})">' + "".join(inside) + "</g>")
        top += height
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {top:g}" role="img" '
        f'aria-label="{what}"><style>{_STYLE}</style>'
        f'<rect class="paper" width="{_WIDTH}" height="{top:g}"/>' + "".join(marks) + "</svg>\n"
    )


def _bars(title: str, bars: Sequence[Bar]) -> tuple[float, list[str]]:
    across = Scale(0.0, max(bar[1] for bar in bars), _LEFT, _WIDTH - _RIGHT - 30)
    marks = [_title(title)]
    for number, (name, value, text, colour) in enumerate(bars):
        y = _TOP + number * _ROW
        x = across(value)
        marks.append(label(_LEFT - 8, y + 13, name, "end"))
        marks.append(
            f'<rect class="{colour}" x="{_LEFT}" y="{y}" width="{x - _LEFT:.1f}" height="{_ROW - 5}"/>'
        )
        marks.append(label(x + 6, y + 13, text, "start", faint=True))
    return _TOP + len(bars) * _ROW + 18, marks


def _title(text: str) -> str:
    return f'<text class="title" x="8" y="24">{text}</text>'


def _rule(start: float, stop: float, y: float) -> str:
    return f'<line class="rule" x1="{start}" x2="{stop}" y1="{y:.1f}" y2="{y:.1f}"/>'
