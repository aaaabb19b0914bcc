"""Options that mean the same in every command of `stride evaluate` and in `stride baseline`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stride_cli.commands.completion import RESPONSES, complete_methods, one_of
from stride_cli.commands.options import find_index

if TYPE_CHECKING:
    from stride_cli.evaluation.bench import Bench

Queries = Annotated[
    Path | None,
    typer.Option(
        "--queries", help="File of queries (classifiers: or held-out); default: those of the truth."
    ),
]
Methods = Annotated[
    str,
    typer.Option(
        "--methods",
        "--method",
        help="Methods, separated by commas, each with options: tfidf:ngrams=1,top=100; any takes "
        "top=K (its K strongest scores) and shrink=true.",
        autocompletion=complete_methods,
    ),
]
Alpha = Annotated[
    float | None,
    typer.Option("--alpha", help="Use the subsets of this share of the chunks; default: the most numerous."),
]
Response = Annotated[
    str,
    typer.Option(
        "--response",
        help="loss, or margin (classifiers): what retrained models are asked.",
        autocompletion=one_of(*RESPONSES),
    ),
]
Resamples = Annotated[int, typer.Option("--draws", min=100, help="Bootstrap resamples of every interval.")]


def open_bench(
    index: str | None,
    model: str | None,
    queries: Path | None,
    alpha: float | None,
    device: str | None,
    dtype: str | None,
) -> Bench:
    """Index, truth and queries as the shared options name them."""
    from stride_cli.config import resolve
    from stride_cli.data.workspace import WorkspacePath
    from stride_cli.evaluation.bench import Bench

    general = resolve("general", {"model": model})
    where = WorkspacePath(find_index(index), general.model, device or "auto", dtype or "auto")
    return Bench(where, queries=queries, alpha=alpha)
