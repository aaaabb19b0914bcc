"""Answers as a person reads them, on a terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from stride_cli import output
from stride_cli.attribution.passages import matching_spans
from stride_cli.characters import one_line, printable, shortened
from stride_cli.report import explanation as told

if TYPE_CHECKING:
    from stride_cli.api import Answer

_BAR = 10
_POOLED = 3  # of the prompts that are answered as one, those shown
_SIDE_BY_SIDE = 140  # columns from which supporters and opposers stand beside each other
_COLOURS = {"supports": "green", "opposes": "magenta"}
_VERDICTS = {"clear": "green", "weak": "yellow", "guessing": "bold yellow"}


def render_answer(answer: Answer, *, verbose: bool = False, console: Console | None = None) -> None:
    """One answer on stdout: what was said, its documents with their passages, the certificate.

    Parameters
    ----------
    verbose : bool      also two sentences on what to conclude, the certificate, time by stage, and the spot
        check of the measurement
    console : rich's Console, optional      default: a new one on stdout (it honours NO_COLOR)
    """
    console = console or output.console()
    record = answer.to_record()
    console.print(_title(record))
    style = _VERDICTS.get(record["verdict"] or "", "dim")
    if verbose:
        console.print(Text(printable(told.explain(record)), style=style))
    elif record["verdict"] is not None or not answer.labels:
        console.print(Text(told.verdict(record) or told.no_verdict(record), style=style))
    for said in filter(None, [told.untrained(record), told.nothing_listed(record)]):
        console.print(Text(said, style="yellow"))
    tokens = record["scored_tokens"]
    likely = f"{tokens} scored token{'s' * (tokens != 1)}, probability {math.exp(-answer.loss):.2g}"
    likely += " a token" if tokens != 1 else ""
    if comparison := record.get("comparison"):
        likely = told.odds(comparison)
    if record["template"] == "chat":
        likely += ", asked in the chat template"
    console.print(Text(likely, style="dim"))
    largest = max((abs(hit["influence"]) for hit in record["hits"] + record["opposers"]), default=0.0)
    lists = [
        Group(*_list(title, hits, record, largest))
        for title, hits in (
            ("documents that support this", record["hits"]),
            ("documents that oppose this", record["opposers"]),
        )
        if hits
    ]
    if len(lists) == 2 and console.width >= _SIDE_BY_SIDE:
        table = Table.grid(padding=(0, 4, 0, 0), expand=True)
        table.add_column(ratio=1)
        table.add_column(ratio=1)
        table.add_row(*lists)
        console.print(table)
    else:
        for each in lists:
            console.print(each)
    console.print(Text(_how(answer), style="dim"))
    if verbose:
        solution = answer.solution
        certificate = (
            f"λ = {solution.lambda_ratio:g} λ_max, {solution.moved} of {solution.n_chunks} chunks moved by "
            f"the subsets, relative duality gap {solution.relative_gap:.1e}, R² {solution.r_squared:.3f}"
        )
        console.print(Text(certificate, style="dim"))
        stages = ", ".join(f"{stage} {seconds:.2f} s" for stage, seconds in answer.seconds.items())
        console.print(Text(stages, style="dim"))
        if answer.measurement.agreement is not None:
            check = f"linear and exact measurement agree at r = {answer.measurement.agreement:.4f}"
            console.print(Text(check, style="dim"))


def _title(record: Mapping[str, Any]) -> Text:
    """Show the prompt and the response; of many prompts the first few."""
    prompts, responses = [record["prompt"]], [record["response"]]
    title = Text()
    if pooled := record.get("pooled"):
        added = ": what supports any of them, added up" if record["added"] == "support" else ""
        title.append(f"{pooled:,} prompts as one{added}\n", style="bold")
        prompts, responses = (each[0].splitlines()[:_POOLED] for each in (prompts, responses))
        prompts, responses = ([shortened(line, 70) for line in each] for each in (prompts, responses))
    for place, (prompt, response) in enumerate(zip(prompts, responses, strict=False)):
        title.append("\n" if place else "")
        title.append(printable(prompt), style="bold")
        title.append(printable(response if not pooled else f" {response.strip()}"), style="bold green")
    if pooled and pooled > len(prompts):
        title.append("\n…", style="bold")
    if instead := record.get("instead"):
        title.append("\nrather than ", style="dim")
        title.append(printable(instead.strip()), style="bold magenta")
    return title


def _how(answer: Answer) -> str:
    """Say where the numbers come from, and what they are not."""
    subsets, record = len(answer.solution.residual), answer.to_record()
    found = f"{told.what_scores_are(record)}; "
    if answer.read:
        found += f"{answer.read:,} chunks read from their own gradients, others "
    found += told.estimated_from(record, subsets)
    if recall := record.get("recall"):
        found += f"; {told.found_of(recall)}"
    if answer.shrinkage is not None:
        found += ", small ones shrunk"
    if answer.measurement.coverage < 1:
        found += f"; {answer.measurement.coverage:.1%} of the chunks seen"
    return found


def _list(
    title: str, hits: Sequence[Mapping[str, Any]], record: Mapping[str, Any], largest: float
) -> list[RenderableType]:

    query = f"{record['prompt']} {record['response']}"
    number = max(len(f"{hit['rank']:g}") for hit in hits)
    lines: list[RenderableType] = [Text(f"\n{title}", style="italic")]
    parted = told.line_at([hit["above_line"] for hit in hits]) if hits[0]["sign"] == "supports" else None
    for place, hit in enumerate(hits):
        if place == parted:
            lines.append(Text(f"{'─' * (number + 1)} {told.BELOW_THE_LINE} ───", style="dim"))
        lines.append(_heading(hit, record, largest, number))
        lines.append(Padding(_passage(hit, query), (0, 0, 0, number + 1)))
    return lines


def _heading(hit: Mapping[str, Any], record: Mapping[str, Any], largest: float, number: int) -> Text:
    """Rank, bar, share, score, document and what is special about it."""
    filled = round(_BAR * abs(hit["influence"]) / largest) if largest else 0
    if hit["influence"]:
        filled = max(1, filled)
    line = Text(f"{hit['rank']:>{number}g} ")
    line.append("█" * filled, style=_COLOURS[hit["sign"]])
    line.append("░" * (_BAR - filled), style="dim")
    if hit["backfilled"]:
        line.append("   –  ")
    else:
        line.append(f" {hit['share']:4.0%} ")
        line.append(f"{told.score(hit['influence'], largest, record)} ", style="dim")
    line.append(one_line(hit["document"]), style="bold")
    special = "; ".join(told.flags(hit))
    if special:
        line.append(f"  {special}", style="yellow")
    return line


def _passage(hit: Mapping[str, Any], query: str) -> Text:
    """The passage with the words of the query marked."""
    passage = printable(hit["passage"])
    text = Text(passage)
    for start, stop in matching_spans(passage, query):
        text.stylize("bold yellow", start, stop)
    return text
