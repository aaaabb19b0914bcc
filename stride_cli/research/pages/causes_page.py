"""Methods judged by known causes as one HTML file: tables and plots, no script, no network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any

from index_format.durable import replace_file
from stride_cli.characters import html_text
from stride_cli.research.evaluation.cause_scores import CauseBench, CauseEntry
from stride_cli.research.evaluation.records import CausesRecord
from stride_cli.research.pages.drawing import (
    COLOURS,
    cells,
    failure_cell,
    interval_plot,
    page,
    scrolled,
    table,
)


def write_page(
    path: Path, bench: CauseBench, entries: Sequence[CauseEntry], records: Sequence[CausesRecord]
) -> None:
    """Write the page at `path`, whole; entries and records are of the same methods, in the same order."""
    replace_file(path, render_page(bench, entries, records).encode())


def render_page(bench: CauseBench, entries: Sequence[CauseEntry], records: Sequence[CausesRecord]) -> str:
    """Render the page as text."""
    good = [record for record in records if "error" not in record]
    colours = {record["method"]: f"var(--c{number % COLOURS})" for number, record in enumerate(good)}
    first = records[0]
    asked = "" if first["counted"] == first["queries"] else f" ({first['queries']:,} asked)"
    parts = [
        f'<p class="faint">{first["counted"]:,} queries{asked}, {first["documents"]:,} documents.</p>',
        "<p>Of every query it is known which documents taught its answer. Each method ranks all documents; "
        "the measures say how high it puts the causes. Tied documents count as in random order. Intervals "
        "are 95 % bootstraps over queries.</p>",
        _table(records),
    ]
    if len(good) > 1:
        parts += [
            "<h2>Minus the best other method</h2>",
            '<p class="faint">Query by query, on the same resamples: above zero throughout, the method is '
            "ahead of every other.</p>",
            _table(records, ahead=True),
        ]
    for name, measures in _measures(good).items():
        plot = interval_plot(
            [(method, found["mean"], found["low"], found["high"]) for method, found in measures.items()],
            colours,
            f"{name} of each method with its 95 % interval",
        )
        parts += [f"<h2>{name}</h2>", scrolled(name, plot)]
    if good:
        parts += [
            "<h2>Query by query</h2>",
            '<p class="faint">Rank of the first cause; ties share their mid-rank.</p>',
            _queries(bench, entries),
        ]
    return page(f"Known causes in {Path(str(bench.workspace.index.path)).name}", parts)


def _measures(records: Sequence[CausesRecord]) -> dict[str, dict[str, Mapping[str, Any]]]:
    """Sort records by measure and method."""
    found: dict[str, dict[str, Mapping[str, Any]]] = {}
    for record in records:
        for recall in record["recall"]:
            found.setdefault(f"Recall@{recall['k']}", {})[record["method"]] = recall
        found.setdefault("MRR", {})[record["method"]] = record["mrr"]
        found.setdefault("AUPRC", {})[record["method"]] = record["auprc"]
    return found


def _table(records: Sequence[CausesRecord], *, ahead: bool = False) -> str:
    """Lay out every measure of every method, or its lead over the best other method."""
    heads = [*(f"Recall@{each['k']}" for each in records[0]["recall"]), "MRR", "AUPRC"]
    pooled = not ahead and any("pooled" in record for record in records)
    heads += ["AUPRC, queries added up"] if pooled else []
    heads += ["best other"] if ahead else ["fit, s", "a query, s"]
    rows = []
    for record in records:
        name = f"<td>{html_text(record['method'])}</td>"
        if "error" in record:
            rows += [] if ahead else [name + failure_cell(record["error"], len(heads))]
            continue
        found = [
            _cell(measure["difference"] if ahead else measure, "+" if ahead else "")
            for measure in [*record["recall"], record["mrr"], record["auprc"]]
        ]
        if pooled:
            found.append(f"{record['pooled']['average_precision']:.3f}" if "pooled" in record else "–")
        if ahead:
            found.append(html_text(record["auprc"]["best_other"] or "–") + " (AUPRC)")
        else:
            seconds = (record["seconds"]["fit"], record["seconds"]["query"])
            found += ["–" if value is None else f"{value:.3g}" for value in seconds]
        rows.append(name + cells(found))
    return table("Minus the best other method" if ahead else "Methods", ["method", *heads], rows)


def _cell(found: Mapping[str, Any], sign: str) -> str:
    if found["mean"] is None:
        return "–"
    known = isfinite(found["low"]) and isfinite(found["high"])  # of one query no interval is
    span = f"{found['low']:{sign}.2f} … {found['high']:{sign}.2f}" if known else "–"
    return f'{found["mean"]:{sign}.3f}<br><span class="faint">{span}</span>'


def _queries(bench: CauseBench, entries: Sequence[CauseEntry]) -> str:
    """Lay out the rank of the first cause of every query, by every method."""
    good = [entry for entry in entries if entry.error is None]
    rows = []
    for row, query in enumerate(bench.asked):
        tip = html_text(f"{query.prompt} … {query.response}")
        ranks = [f"{entry.ranked[row].places.ranks.min():,g}" for entry in good]
        rows.append(
            f'<td title="{tip}">{html_text(query.id)}</td>' + cells([f"{len(query.causes):,}", *ranks])
        )
    heads = ["query", "causes", *(html_text(entry.method) for entry in good)]
    return table("Query by query", heads, rows)
