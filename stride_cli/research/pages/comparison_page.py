"""A comparison as one HTML file: table and plots, no script, no network, light and dark."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from index_format.durable import replace_file
from stride_cli.characters import html_text, shortened
from stride_cli.report.drawing import WIDTH, Scale, label, svg, ticks_for
from stride_cli.research.evaluation.compare import Entry, Ground
from stride_cli.research.pages.drawing import (
    COLOURS,
    apart,
    cells,
    failure_cell,
    interval_plot,
    page,
    scrolled,
    table,
)


def write_page(path: Path, entries: Sequence[Entry], ground: Ground, *, index_name: str) -> None:
    """Write the page at `path`, whole; failed entries stand in the table with their error."""
    replace_file(path, render_page(entries, ground, index_name=index_name).encode())


def render_page(entries: Sequence[Entry], ground: Ground, *, index_name: str) -> str:
    """Render the page as text."""
    good = [entry for entry in entries if entry.estimates]
    colours = {entry.method: f"var(--c{number % COLOURS})" for number, entry in enumerate(good)}
    ceiling = (
        f"The noise between {ground.n_seeds} seeds leaves an LDS of at most {ground.ceiling:.3f}."
        if ground.ceiling is not None
        else "Trained from one seed a subset: how high an LDS the noise allows is not known."
    )
    warnings = [html_text(warning[0].upper() + warning[1:]) for warning in ground.warnings]
    parts = [
        *([_ahead(good)] if good else []),
        f'<p class="faint">{ground.n_subsets} retrained subsets of {ground.alpha:.0%} of the chunks × '
        f"{ground.seeds}, {ground.n_queries} queries, by {ground.response}.</p>",
        "<p>LDS: how well the scores of a subset’s chunks, summed, predict what a model really retrained on "
        "that subset makes of a query. Spearman correlation over the subsets, mean over queries; intervals "
        f"are 95 % bootstraps over queries and subsets together. {ceiling}</p>",
        *(f'<p class="warning">{warning}.</p>' for warning in warnings),
        _table(entries),
    ]
    if good:
        parts += [
            "<h2>LDS by method</h2>",
            scrolled("LDS by method", _lds_plot(good, ground, colours)),
            "<h2>LDS against cost</h2>",
            '<p class="faint">Seconds to fit the method and to score all queries.</p>',
            scrolled("LDS against cost", _cost_plot(good, colours)),
        ]
    return page(f"Attribution methods on {index_name}", parts)


def _table(entries: Sequence[Entry]) -> str:
    reference = html_text(entries[0].method) if entries else ""
    heads = ["method", "LDS (Spearman)", f"minus {reference}", "Pearson", "Kendall", "fit, s", "a query, s"]
    heads += ["memory, MiB", "disk, B a chunk"]
    rows = []
    for entry in entries:
        name = f"<td>{html_text(entry.method)}</td>"
        if entry.estimates is None or entry.run is None:
            rows.append(name + failure_cell(entry.error or "", len(heads) - 1))
            continue
        run, ahead = entry.run, entry.difference and entry.difference.joint
        found = [_estimate(entry.estimates["spearman"].joint), _estimate(ahead, "+") if ahead else "–"]
        found += [f"{entry.estimates[kind].mean:.3f}" for kind in ("pearson", "kendall")]
        found += [f"{run.fit_seconds:.3g}", f"{run.score_seconds / max(1, len(run.predicted)):.3g}"]
        found.append("–" if run.memory_bytes is None else f"{run.memory_bytes / 2**20:,.0f}")
        rows.append(name + cells([*found, f"{run.bytes_per_chunk:,.0f}"]))
    return table("Methods", heads, rows)


def _estimate(found: Any, sign: str = "") -> str:
    """Write a mean with its 95 % interval below."""
    span = f"{found.low:{sign}.3f} … {found.high:{sign}.3f}"
    return f'{found.mean:{sign}.3f}<br><span class="faint">{span}</span>'


def _ahead(entries: Sequence[Entry]) -> str:
    """Say in a sentence which method is ahead, and which cannot be told from it."""
    found = [(entry.estimates["spearman"].joint, entry.method) for entry in entries if entry.estimates]
    (best, name), *others = sorted(found, key=lambda each: -each[0].mean)
    near = [method for lds, method in others if lds.high >= best.low]
    told = f"<b>{html_text(name)}</b> has the highest LDS, {best.mean:.3f} ({best.low:.3f} … {best.high:.3f})"
    beside = (
        f"; intervals do not tell it from {html_text(', '.join(near))}" if near else ", ahead of all others"
    )
    return f'<p class="found">{told}{beside if others else ""}.</p>'


def _lds_plot(entries: Sequence[Entry], ground: Ground, colours: dict[str, str]) -> str:
    """Plot a dot and its interval for each method."""
    found = [(entry.method, entry.estimates["spearman"].joint) for entry in entries if entry.estimates]
    return interval_plot(
        [(method, joint.mean, joint.low, joint.high) for method, joint in found],
        colours,
        "LDS of each method with its 95 % interval",
        ceiling=None if ground.ceiling is None else (ground.ceiling, "noise ceiling"),
    )


def _cost_plot(entries: Sequence[Entry], colours: dict[str, str]) -> str:
    """Plot LDS over seconds, on a logarithmic axis."""
    points = [
        (entry.method, max(entry.seconds or 0.0, 1e-3), entry.estimates["spearman"].mean)
        for entry in entries
        if entry.estimates
    ]
    first = math.floor(min(math.log10(seconds) for _, seconds, _ in points))
    last = math.ceil(max(math.log10(seconds) for _, seconds, _ in points) + 1e-9)
    last = max(last, first + 1)
    ticks = ticks_for(min(0.0, *(lds for *_, lds in points)), max(0.0, *(lds for *_, lds in points)))
    height = 320
    across = Scale(first, last, 60, WIDTH - 110)
    down = Scale(ticks[0], ticks[-1], height - 45, 15)
    marks = [
        f'<line class="{"zero" if abs(tick) < 1e-9 else "rule"}" x1="60" x2="{WIDTH - 110}" '
        f'y1="{down(tick):.1f}" y2="{down(tick):.1f}"/>'
        + label(52, down(tick) + 4, f"{tick:g}", "end", faint=True)
        for tick in ticks
    ]
    for power in range(first, last + 1):
        marks.append(label(across(power), height - 25, f"{10.0**power:g} s", "middle", faint=True))
    marks.append(label((60 + WIDTH - 110) / 2, height - 5, "seconds in all", "middle", faint=True))
    heights = apart(
        [down(lds) + 4 for *_, lds in points],
        [across(math.log10(seconds)) for _, seconds, _ in points],
        lowest=height - 45,
    )
    for (method, seconds, lds), beside in zip(points, heights, strict=True):
        x, y, colour = across(math.log10(seconds)), down(lds), colours[method]
        tip = html_text(f"{method}: LDS {lds:.3f} in {seconds:.3g} s")
        marks.append(
            f'<g><title>{tip}</title><circle cx="{x:.1f}" cy="{y:.1f}" r="6" style="fill:{colour}"/></g>'
            + label(x + 10, beside, shortened(method), "start")
        )
    return svg(height, marks, "LDS of each method against its cost")
