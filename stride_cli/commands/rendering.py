"""Answers as a person reads them, on a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.text import Text

    from stride_cli.api import Answer
    from stride_cli.recovery.ranking import Hit

_BAR = 10


def render_answer(answer: Answer, *, verbose: bool = False) -> None:
    """One answer as a table on stdout: rank, influence, document and passage, then the certificate."""
    from rich.console import Console
    from rich.text import Text

    console = Console()
    title = Text(answer.query.prompt, style="bold")
    title.append(answer.query.response, style="bold green")
    console.print(title)
    console.print(
        f"[dim]{int(answer.query.weights.sum())} scored tokens, loss {answer.loss:.3f} nats a token[/dim]"
    )
    _table(console, "documents that support this", answer.supporters, answer)
    if answer.opposers:
        _table(console, "documents that oppose this", answer.opposers, answer)
    solution = answer.solution
    console.print(
        f"[dim]λ = {solution.lambda_ratio:g} λ_max, "
        f"{len(solution.indices)} of {solution.n_chunks} chunks non-zero, "
        f"relative duality gap {solution.relative_gap:.1e}, R² {solution.r_squared:.3f}, "
        f"coverage {answer.coverage:.0%}[/dim]"
    )
    if verbose:
        stages = ", ".join(f"{stage} {seconds:.2f} s" for stage, seconds in answer.seconds.items())
        console.print(f"[dim]{stages}[/dim]")
        if answer.agreement is not None:
            console.print(f"[dim]linear and exact measurement agree at r = {answer.agreement:.4f}[/dim]")


def _table(console, title: str, hits: list[Hit], answer: Answer) -> None:  # type: ignore[no-untyped-def]
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=None, pad_edge=False, show_edge=False)
    table.add_column("#", justify="right")
    table.add_column("influence", justify="left", no_wrap=True)
    table.add_column("document", overflow="fold", max_width=36)
    table.add_column("passage", overflow="fold")
    largest = max((abs(hit.influence) for hit in hits), default=0.0)
    query = f"{answer.query.prompt} {answer.query.response}"
    for hit in hits:
        filled = round(_BAR * abs(hit.influence) / largest) if largest else 0
        share = "   –" if hit.backfilled else f"{hit.share:4.0%}"
        flags = []
        if hit.backfilled:
            flags.append("by correlation only")
        if not hit.seen:
            flags.append("never seen by the operators")
        if hit.neighbours:
            flags.append(f"{hit.neighbours} indistinguishable chunks")
        document = escape(answer.document_ids[hit.document])
        if flags:
            document += f"\n[dim]{'; '.join(flags)}[/dim]"
        table.add_row(
            f"{hit.rank:g}",
            f"{share} " + "█" * filled,
            document,
            _highlight(answer.passages.get(hit.chunk, ""), query),
        )
    console.print(table)


def _highlight(passage: str, query: str) -> Text:
    """The passage with the words of the query marked."""
    from rich.text import Text

    from stride_cli.recovery.passages import matching_spans

    text = Text(passage)
    for start, stop in matching_spans(passage, query):
        text.stylize("bold yellow", start, stop)
    return text
