"""Answers as a person reads them, on a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.text import Text

from stride_cli import output
from stride_cli.attribution.frames import influence_text, share_text
from stride_cli.characters import one_line, printable, shortened
from stride_cli.report import explanation as told
from stride_cli.report.contents import matching_spans
from stride_cli.schema.answer_records import DECIDED, UNJUDGED, VERDICTS, sections

if TYPE_CHECKING:
    from stride_cli.api import Answer

_BAR = 10
_POOLED = 3  # of the prompts that are answered as one, those shown
_COLOURS = {"supports": "green", "opposes": "magenta"}


def render_answer(answer: Answer, *, verbose: bool = False, console: Console | None = None) -> None:
    """One answer on stdout: what was said, its documents with their passages, the certificate.

    Parameters
    ----------
    verbose : bool      also what to conclude, the certificate, and time by stage
    console : rich's Console, optional      default: a new one on stdout (it honours NO_COLOR)
    """
    console = console or output.console()
    record = answer.to_record()
    console.print(_title(record, answer.pieces))
    style = VERDICTS.get(record["verdict"] or "", UNJUDGED).colour
    judged = told.explain(record) if verbose else told.verdict(record)
    beside = [] if verbose else [told.untrained(record), told.nothing_listed(record)]
    for said, colour in ((judged, style), *((each, "yellow") for each in beside)):
        if said:
            console.print(Text(printable(said), style=colour))
    console.print(Text(told.asked(record), style="dim"))
    for heading, hits, quiet in sections(record):
        console.print(Text(f"\n{heading}", style="dim italic" if quiet else "italic"))
        for line in _hits(hits, record, quiet):
            console.print(line)
    for said in filter(None, [told.fewer(record), told.how_found(record)]):
        console.print(Text(said, style="dim"))
    if verbose:
        solution = answer.solution
        certificate = (
            f"λ = {solution.lambda_ratio:g} λ_max, {solution.moved} of {solution.n_chunks} chunks moved by "
            f"the subsets, relative duality gap {solution.relative_gap:.1e}, R² {solution.r_squared:.3f}"
        )
        console.print(Text(certificate, style="dim"))
        stages = ", ".join(f"{stage} {seconds:.2f} s" for stage, seconds in answer.seconds.items())
        console.print(Text(stages, style="dim"))


def _title(record: Mapping[str, Any], pieces: Sequence[tuple[str, float]]) -> Text:
    """Show the prompt and the response, underlined what the prompt decides; of many prompts the first few."""
    prompts, responses = [record["prompt"]], [record["response"]]
    title = Text()
    if pooled := record.get("pooled"):
        added = ": what supports any of them, added up" if record["added"] == "support" else ""
        title.append(f"{pooled:,} prompts as one{added}\n", style="bold")
        prompts, responses = (each[0].splitlines()[:_POOLED] for each in (prompts, responses))
        prompts, responses = ([shortened(line, 70) for line in each] for each in (prompts, responses))
    for place, (prompt, response) in enumerate(zip(prompts, responses, strict=False)):
        title.append("\n" if place else "")
        title.append(printable(prompt))
        whole = response if not pooled else f" {response.strip()}"
        for text, weight in pieces or [(whole, 0.0)]:
            title.append(printable(text), style="bold underline" if weight >= DECIDED else "bold")
    title.append("…" * bool(record["cut"]), style="dim")
    if pooled and pooled > len(prompts):
        title.append("\n…", style="bold")
    if instead := record.get("instead"):
        title.append("\nrather than ", style="dim")
        title.append(printable(instead.strip()), style="bold")
    return title


def _hits(
    hits: Sequence[Mapping[str, Any]], record: Mapping[str, Any], quiet: bool
) -> Iterator[RenderableType]:
    """Show documents; grey and without numbers where they are `quiet`."""
    query = f"{record['prompt']} {record['response']}"
    number = max((len(f"{hit['rank']:g}") for hit in hits), default=0)
    for hit in hits:
        line, passage = Text(f"{hit['rank']:>{number}g} "), Text(printable(hit["passage"]))
        if not quiet:
            filled = round(_BAR * hit["share"])
            line.append("█" * filled, style=_COLOURS[hit["sign"]]).append("░" * (_BAR - filled), style="dim")
            if hit["backfilled"]:
                line.append("   –  ")
            else:
                line.append(f" {share_text(hit['share']):>4} ", style=_COLOURS[hit["sign"]])
                line.append(f"{influence_text(hit, record['unit'])} ", style="dim")
            for start, stop in matching_spans(passage.plain, query):
                passage.stylize("bold yellow", start, stop)
        line.append(one_line(told.called(hit)), style="" if quiet else "bold")
        if "title" in hit:
            line.append(f"  {one_line(hit['document'])}", style="dim")
        if special := "; ".join(told.flags(hit)):
            line.append(f"  {special}", style="" if quiet else "yellow")
        for shown in (line, passage):
            shown.stylize("dim" if quiet else "")
        yield line
        yield Padding(passage, (0, 0, 0, number + 1))
