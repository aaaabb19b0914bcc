"""`stride evaluate selection`: what the documents of `stride select` are worth, fine-tuned on."""

from __future__ import annotations

from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stride_cli.commands.options import Device, Flags, Json, with_flags
from stride_cli.research.commands.evaluate_options import Results
from stride_cli.research.selection.options import JudgingOptions
from stride_cli.training.options import FinetuneOptions

if TYPE_CHECKING:
    from stride_cli.research.selection.records import SeedSpread

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
    json: Json = None,
) -> None:
    """Fine-tune a base model on chosen, random and BM25 documents alike; loss and unigram F1 on held-out
    queries.
    """
    from stride_cli.commands.tables import number
    from stride_cli.research.selection.finetuned import evaluate_selection, read_tasks, score_record

    def cell(found: SeedSpread) -> str:
        mean, deviation = (number(None if isnan(found[key]) else found[key], ".4f") for key in ("mean", "sd"))
        return f"{mean} ± {deviation}"

    judging, options = JudgingOptions(**judged), FinetuneOptions(**given, device=device or "auto")
    results = Results(json)
    for name, scores in evaluate_selection(directory, model, queries, judging, options):
        record = score_record(name, scores, read_tasks(queries))
        results.add(record, name, *map(cell, (record["loss"], record["f1"], record["f1_over_tasks"])))
    columns = ["trained on", "loss (± seeds)", "unigram F1 (± seeds)", "F1 (± tasks)"]
    results.show(f"{directory}, {judging.seeds} seeds", columns)
