"""`stride demo`: everything, on an embedded corpus: train a model, index, fit operators, ask."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from stride_cli.commands.options import Json

EXAMPLE = """\b
Examples:
  stride demo
  stride demo --out /tmp/demo --json | jq '{prompt, top: .hits[0].document}'
"""


def demo(
    out: Annotated[Path, typer.Option("--out", help="Where the corpus, model and index go.")] = Path(
        "stride-demo"
    ),
    every: Annotated[
        bool, typer.Option("--all", help="Ask every prompt that comes with the corpus, not only ten.")
    ] = False,
    train: Annotated[
        bool, typer.Option("--train", help="Train its model here, instead of taking the one that is there.")
    ] = False,
    json: Json = None,
) -> None:
    """Index an embedded encyclopaedia and ask a small model which documents taught it its answers.

    No network and no GPU; about a minute on two cores. Stopped, it goes on where it was; run again, it
    answers at once.
    """
    from stride_cli import api
    from stride_cli.commands.tables import print_table
    from stride_cli.output import emit, note, wants_json

    as_json = wants_json(json)
    session, prompts = api.prepare_demo(out, train_anew=train, say=note)
    asked = [prompt for prompt in prompts if prompt["listed"] or every]
    rows: list[list[str]] = []
    answers = session.query_all([{"prompt": prompt["prompt"]} for prompt in asked])
    for prompt, answer in zip(asked, answers, strict=True):
        record = answer.to_record()
        top = record["hits"][0]["document"] if record["hits"] else None
        correct = top in prompt["documents"]
        if as_json:
            emit(replace(answer, expected=prompt["documents"], found=correct).to_record())
        elif not rows:
            from stride_cli.commands.rendering import render_answer

            render_answer(answer)
        said = record["response"].strip()
        rows.append([prompt["prompt"], said, top or "–", "states it" if correct else "other"])
    if not as_json:
        print_table("prompts and their top documents", ["prompt", "the model says", "top document", ""], rows)
    found = sum(row[-1] == "states it" for row in rows)
    note(f"the document that states it is on top for {found} of {len(asked)} facts, asked in its own words")
    note("\nnext:")
    for command in suggested(str(out / "demo.stride")):
        note(f"  {command}")


def suggested(index: str) -> list[str]:
    """Commands to try next; the questions are such that the model knows the answer."""
    index = shlex.quote(index)
    return [
        f'stride query "The capital of Kenya is" --index {index}',
        f'stride query "The Mughal Empire was founded by" --index {index} --verbose',
        f"stride query \"The largest moon of Saturn is\" --index {index} --json | jq '.hits[0]'",
        f"stride index info {index}",
        "stride ask your-corpus.jsonl --model your-model 'a question'",
    ]
