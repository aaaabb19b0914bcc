"""`stride evaluate selection`: what the documents of `stride select` are worth, fine-tuned on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from stride_cli.commands.options import Device, Flags, Json, with_flags
from stride_cli.research.selection.options import JudgingOptions
from stride_cli.training.options import FinetuneOptions

EXAMPLE = """\b
Examples:
  stride evaluate selection selection --model base --queries heldout.jsonl
  stride evaluate selection selection --model base --queries heldout.jsonl --seeds 5 --epochs 2 --lr 2e-5
"""


@with_flags
def selection(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="What stride select wrote.")],
    model: Annotated[str, typer.Option("--model", metavar="BASE", help="The model to fine-tune.")],
    queries: Annotated[Path, typer.Option("--queries", help="Held-out queries, with responses for F1.")],
    *,
    judged: Annotated[dict[str, Any], Flags(JudgingOptions)],
    given: Annotated[
        dict[str, Any], Flags(FinetuneOptions, only=("epochs", "batch_tokens", "lr", "lora_rank"))
    ],
    device: Device = None,
    json: Json = False,
) -> None:
    """Fine-tune a base model on chosen, random and BM25 documents alike; loss and unigram F1 on held-out
    queries.
    """
    from stride_cli.commands.tables import number, print_table
    from stride_cli.errors import CorpusError
    from stride_cli.output import emit, wants_json
    from stride_cli.research.selection.finetuned import evaluate_selection, score_record
    from stride_cli.research.selection.select import read_tasks

    judging, options = JudgingOptions(**judged), FinetuneOptions(**given, device=device or "auto")
    rows = []
    tasks: list[str] | None = None
    for name, scores in evaluate_selection(directory, model, queries, judging, options):
        if name == "base":
            try:
                tasks = read_tasks(queries)
            except (CorpusError, ValueError):
                tasks = None  # queries without tasks: no spread over them
        record = score_record(name, scores, tasks)
        if wants_json(json):
            emit(record)
        cells = [(record["loss"], ".4f"), (record["f1"], ".4f"), (record["f1_over_tasks"], ".4f")]
        rows.append(
            [name] + [f"{number(_finite(c['mean']), f)} ± {number(_finite(c['sd']), f)}" for c, f in cells]
        )
    if not wants_json(json):
        print_table(
            f"{directory}, {judging.seeds} seeds",
            ["trained on", "loss (± seeds)", "unigram F1 (± seeds)", "F1 (± tasks)"],
            rows,
        )


def _finite(value: float) -> float | None:
    return value if value == value else None
