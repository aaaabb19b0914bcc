"""A comparison as one HTML file: table and plots, no script, no network, light and dark."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path

import numpy as np

from stride_cli.evaluation.compare import Entry, Ground

_WIDTH, _LEFT, _RIGHT = 720, 150, 30
_COLOURS = 8

_STYLE = """
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


def write_page(path: Path, entries: Sequence[Entry], ground: Ground, *, index_name: str) -> None:
    """Write the page at `path`, whole.

    Parameters
    ----------
    entries : as from `compare.compare_methods`; failed ones stand in the table with their error
    index_name : str      for the title
    """
    partial = path.with_name(path.name + ".partial")
    partial.write_text(render_page(entries, ground, index_name=index_name), encoding="utf-8")
    partial.replace(path)


def render_page(entries: Sequence[Entry], ground: Ground, *, index_name: str) -> str:
    """The page as text."""
    good = [entry for entry in entries if entry.estimates]
    colours = {entry.method: f"var(--c{number % _COLOURS})" for number, entry in enumerate(good)}
    ceiling = (
        f"The noise between {ground.n_seeds} seeds leaves an LDS of at most {ground.ceiling.value:.3f}."
        if ground.ceiling
        else "Trained from one seed a subset: how high an LDS the noise allows is not known."
    )
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>Attribution methods on {escape(index_name)}</title><style>{_STYLE}</style></head><body>",
        f"<h1>Attribution methods on {escape(index_name)}</h1>",
        f'<p class="faint">{ground.n_subsets} retrained subsets of {ground.alpha:.0%} of the chunks, '
        f"{ground.n_seeds} seed{'s' if ground.n_seeds > 1 else ''} each, {ground.n_queries} queries, "
        f"by {ground.response}.</p>",
        "<p>LDS: how well the scores of a subset’s chunks, summed, predict what a model really retrained on "
        "that subset makes of a query. Spearman correlation over the subsets, mean over queries; intervals "
        f"are 95 % bootstraps over queries and subsets together. {ceiling}</p>",
        _table(entries),
    ]
    if good:
        parts += [
            "<h2>LDS by method</h2>",
            _lds_plot(good, ground, colours),
            "<h2>LDS against cost</h2>",
            '<p class="faint">Seconds to fit the method and to score all queries.</p>',
            _cost_plot(good, colours),
        ]
    if any(entry.distribution for entry in good):
        parts += [
            "<h2>Concentration of influence</h2>",
            '<p class="faint">Part of the total absolute influence that the highest chunks hold, mean over '
            "queries. Dashed: the same for every chunk.</p>",
            _concentration_plot([entry for entry in good if entry.distribution], colours),
        ]
    return "\n".join([*parts, "</body></html>", ""])


def _table(entries: Sequence[Entry]) -> str:
    reference = escape(entries[0].method) if entries else ""
    heads = (
        "method",
        "LDS (Spearman)",
        "95 % interval",
        f"minus {reference}",
        "95 % interval",
        "Pearson",
        "Kendall",
        "fit, s",
        "a query, s",
        "memory, MiB",
        "disk, B a chunk",
    )
    rows = ["".join(f"<th>{head}</th>" for head in heads)]
    for entry in entries:
        name = f"<td>{escape(entry.method)}</td>"
        if entry.estimates is None or entry.run is None:
            rows.append(
                f'{name}<td class="error" colspan="{len(heads) - 1}">{escape(entry.error or "")}</td>'
            )
            continue
        lds, run = entry.estimates["spearman"].joint, entry.run
        cells = [f"{lds.mean:.3f} ± {lds.se:.3f}", f"{lds.low:.3f} … {lds.high:.3f}"]
        if entry.difference:
            found = entry.difference.joint
            cells += [f"{found.mean:+.3f}", f"{found.low:+.3f} … {found.high:+.3f}"]
        else:
            cells += ["–", "–"]
        cells += [f"{entry.estimates[kind].mean:.3f}" for kind in ("pearson", "kendall")]
        cells += [f"{run.fit_seconds:.3g}", f"{run.score_seconds / max(1, len(run.predicted)):.3g}"]
        cells.append("–" if run.memory_bytes is None else f"{run.memory_bytes / 2**20:,.0f}")
        cells.append(f"{run.bytes_per_chunk:,.0f}")
        rows.append(name + "".join(f"<td>{cell}</td>" for cell in cells))
    return '<div class="wide"><table>' + "".join(f"<tr>{row}</tr>" for row in rows) + "</table></div>"


def _lds_plot(entries: Sequence[Entry], ground: Ground, colours: dict[str, str]) -> str:
    """A dot and its interval for each method, best first."""
    found = sorted(
        ((entry.method, entry.estimates["spearman"].joint) for entry in entries if entry.estimates),
        key=lambda pair: -pair[1].mean,
    )
    values = [value for _, joint in found for value in (joint.low, joint.high)] + [0.0]
    if ground.ceiling:
        values.append(ground.ceiling.value)
    ticks = _ticks(min(values), max(values))
    height = 30 * len(found) + 50
    scale = _Scale(ticks[0], ticks[-1], _LEFT, _WIDTH - _RIGHT)
    marks = []
    for tick in ticks:
        x, kind = scale(tick), "zero" if abs(tick) < 1e-9 else "rule"
        marks.append(f'<line class="{kind}" x1="{x:.1f}" x2="{x:.1f}" y1="10" y2="{height - 35}"/>')
        marks.append(_text(x, height - 18, f"{tick:g}", "middle", faint=True))
    if ground.ceiling:
        x = scale(ground.ceiling.value)
        marks.append(
            f'<line class="ceiling" x1="{x:.1f}" x2="{x:.1f}" y1="10" y2="{height - 35}"/>'
            + _text(x, height - 4, "noise ceiling", "end" if x > _WIDTH - 100 else "middle", faint=True)
        )
    for row, (method, joint) in enumerate(found):
        y, colour = 28 + 30 * row, colours[method]
        tip = escape(f"{method}: {joint.mean:.3f}, {joint.low:.3f} … {joint.high:.3f}")
        marks.append(
            f"<g><title>{tip}</title>"
            f'<line x1="{scale(joint.low):.1f}" x2="{scale(joint.high):.1f}" y1="{y}" y2="{y}" '
            f'style="stroke:{colour}" stroke-width="3" stroke-opacity=".55" stroke-linecap="round"/>'
            f'<circle cx="{scale(joint.mean):.1f}" cy="{y}" r="5" style="fill:{colour}"/></g>'
            + _text(_LEFT - 10, y + 4, _shortened(method), "end")
        )
    return _svg(height, marks, "LDS of each method with its 95 % interval")


def _cost_plot(entries: Sequence[Entry], colours: dict[str, str]) -> str:
    """LDS over seconds, on a logarithmic axis."""
    points = [
        (entry.method, max(entry.seconds or 0.0, 1e-3), entry.estimates["spearman"].mean)
        for entry in entries
        if entry.estimates
    ]
    first = math.floor(min(math.log10(seconds) for _, seconds, _ in points))
    last = math.ceil(max(math.log10(seconds) for _, seconds, _ in points) + 1e-9)
    last = max(last, first + 1)
    ticks = _ticks(min(0.0, *(lds for *_, lds in points)), max(0.0, *(lds for *_, lds in points)))
    height = 320
    across = _Scale(first, last, 60, _WIDTH - 110)
    down = _Scale(ticks[0], ticks[-1], height - 45, 15)
    marks = [
        f'<line class="{"zero" if abs(tick) < 1e-9 else "rule"}" x1="60" x2="{_WIDTH - 110}" '
        f'y1="{down(tick):.1f}" y2="{down(tick):.1f}"/>'
        + _text(52, down(tick) + 4, f"{tick:g}", "end", faint=True)
        for tick in ticks
    ]
    for power in range(first, last + 1):
        marks.append(_text(across(power), height - 25, f"{10.0**power:g} s", "middle", faint=True))
    marks.append(_text((60 + _WIDTH - 110) / 2, height - 5, "seconds in all", "middle", faint=True))
    labels = _apart(
        [down(lds) + 4 for *_, lds in points],
        [across(math.log10(seconds)) for _, seconds, _ in points],
        lowest=height - 45,
    )
    for (method, seconds, lds), label in zip(points, labels, strict=True):
        x, y, colour = across(math.log10(seconds)), down(lds), colours[method]
        tip = escape(f"{method}: LDS {lds:.3f} in {seconds:.3g} s")
        marks.append(
            f'<g><title>{tip}</title><circle cx="{x:.1f}" cy="{y:.1f}" r="6" style="fill:{colour}"/></g>'
            + _text(x + 10, label, _shortened(method), "start")
        )
    return _svg(height, marks, "LDS of each method against its cost")


def _concentration_plot(entries: Sequence[Entry], colours: dict[str, str]) -> str:
    """Part of Σ|w| over the top share of the chunks, on a logarithmic axis."""
    smallest = min(float(entry.distribution.curve_share[0]) for entry in entries if entry.distribution)
    first = min(-1.0, math.log10(smallest))
    height = 340
    across = _Scale(first, 0, 60, _WIDTH - 150)
    down = _Scale(0, 1, height - 45, 15)
    marks = []
    for tick in (0, 0.25, 0.5, 0.75, 1):
        y = down(tick)
        marks.append(f'<line class="rule" x1="60" x2="{_WIDTH - 150}" y1="{y:.1f}" y2="{y:.1f}"/>')
        marks.append(_text(52, y + 4, f"{tick:.0%}", "end", faint=True))
    for power in range(math.ceil(first - 1e-9), 1):
        marks.append(_text(across(power), height - 25, f"{100 * 10.0**power:g} %", "middle", faint=True))
    marks.append(_text((60 + _WIDTH - 150) / 2, height - 5, "highest chunks", "middle", faint=True))
    shares = np.logspace(first, 0, 40)
    marks.append(
        f'<path class="ceiling" fill="none" d="{_path(shares, shares, across, down)}"/>'
    )  # every chunk the same
    for number, entry in enumerate(entries):
        assert entry.distribution is not None
        share, mass = entry.distribution.curve_share, entry.distribution.curve_mass
        colour, y = colours[entry.method], 24 + 18 * number
        dashes = ' stroke-dasharray="6 3"' if number >= _COLOURS else ""
        marks.append(
            f"<g><title>{escape(entry.method)}</title>"
            f'<path fill="none" d="{_path(share, mass, across, down)}" style="stroke:{colour}" '
            f'stroke-width="2"{dashes}/></g>'
            f'<line x1="{_WIDTH - 138}" x2="{_WIDTH - 118}" y1="{y}" y2="{y}" style="stroke:{colour}" '
            f'stroke-width="3"{dashes}/>' + _text(_WIDTH - 112, y + 4, _shortened(entry.method, 16), "start")
        )
    return _svg(max(height, 40 + 18 * len(entries)), marks, "Concentration of influence")


class _Scale:
    """A linear map from values to positions."""

    def __init__(self, low: float, high: float, start: float, stop: float) -> None:
        self._low, self._start = low, start
        self._factor = (stop - start) / (high - low)

    def __call__(self, value: float) -> float:
        return self._start + (value - self._low) * self._factor


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers that enclose [low, high], about five."""
    spread = max(high - low, 1e-3)
    step = 10.0 ** math.floor(math.log10(spread / 4))
    step *= next(factor for factor in (1, 2, 2.5, 5, 10) if spread / (step * factor) <= 6)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(number * step, 10) for number in range(first, max(last, first + 1) + 1)]


def _apart(
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


def _path(share: np.ndarray, mass: np.ndarray, across: _Scale, down: _Scale) -> str:
    points = (f"{across(math.log10(s)):.1f} {down(m):.1f}" for s, m in zip(share, mass, strict=True))
    return "M" + " L".join(points)


def _text(x: float, y: float, text: str, anchor: str, *, faint: bool = False) -> str:
    kind = ' class="faint"' if faint else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{kind}>{escape(text)}</text>'


def _shortened(name: str, length: int = 20) -> str:
    return name if len(name) <= length else name[: length - 1] + "…"


def _svg(height: float, marks: Sequence[str], label: str) -> str:
    return (
        f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{escape(label)}" '
        f'xmlns="http://www.w3.org/2000/svg">' + "".join(marks) + "</svg>"
    )
