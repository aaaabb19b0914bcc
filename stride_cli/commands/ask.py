"""`stride ask`: a corpus and a prompt; what is missing between them is made first."""

from __future__ import annotations

import glob
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from index_format.errors import IndexMismatch
from index_format.location import local_directory
from stride_cli.attribution.options import CalibrationOptions, QueryOptions, QuestionOptions
from stride_cli.commands.options import (
    ASKED,
    READING,
    AnswerOptions,
    Flags,
    Held,
    PromptFile,
    settled,
    with_flags,
)
from stride_cli.commands.tables import next_step
from stride_cli.corpus.readers import ReadOptions
from stride_cli.errors import UsageError

if TYPE_CHECKING:
    from stride_cli.api import Answer, Session

EXAMPLE = """\b
Examples:
  stride ask corpus.jsonl --model model "The French Revolution began in"
  stride ask corpus.jsonl "The capital of Kenya is" "The largest moon of Saturn is" --top 3
  stride ask corpus.jsonl --train "The French Revolution began in"
  cat prompts.txt | stride ask corpus.jsonl - --json | jq '.hits[0].document'
"""
_SUFFIXES = {".gz", ".zst", ".jsonl", ".ndjson", ".jsonlines", ".json", ".parquet", ".pq", ".txt"}


@with_flags
def ask(
    corpus: Annotated[
        str,
        typer.Argument(
            metavar="CORPUS",
            help="JSON Lines (.jsonl, .gz, .zst), Parquet or a plain text file, or a glob in quotes.",
            show_default=False,
        ),
    ],
    prompts: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[PROMPT]...", help="Prompts; - reads one a line from stdin.", show_default=False
        ),
    ] = None,
    *,
    train: Annotated[
        bool,
        typer.Option(
            "--train",
            help="First train a small model on the corpus, as stride model train does: beside the corpus, or "
            "at --model.",
        ),
    ] = False,
    index: Annotated[
        Path | None,
        typer.Option(
            "--index", metavar="DIR", help="Where the index is, or goes. [beside the corpus: corpus.stride]"
        ),
    ] = None,
    file: PromptFile = None,
    question: Annotated[QuestionOptions, Flags(QuestionOptions)],
    options: Annotated[QueryOptions, Flags(QueryOptions, only=ASKED, first=("top", "bottom", "chat"))],
    where: Held,
    reading: Annotated[ReadOptions, Flags(*READING, leave_out=("on_bad",))],
    how: Annotated[AnswerOptions, Flags(AnswerOptions)],
) -> None:
    """Ask which documents of a corpus made a model say something, and build first what that takes.

    The first time it builds the index and fits its operators; stopped, the same command goes on where it
    was. From then on it answers at once, without --model too. Documents added at the end of the corpus are
    added to the index.
    """
    from stride_cli.output import note, progress

    with progress("starting"):
        from stride_cli import api
        from stride_cli.commands.query import answer_prompts
        from stride_cli.commands.train import train_settings
    if corpus == "-":
        raise UsageError(
            "a corpus for stride ask is in files, which it reads again to see what has changed (found -)",
            fix="stride index build - --model MODEL, then stride train and stride query",
        )
    place, session = replace(where, index=index or beside(corpus, ".stride")), None

    def opened() -> Session:
        nonlocal place, session
        if not local_directory(place.index).exists():
            if train:
                made = _trained(corpus, place.model.place, reading, device=place.model.device)
                place = replace(place, model=place.model.at(made))
            elif place.model.place is None:
                raise UsageError(  # which one is asked is the user's to say: the answer is about it
                    f"no model to ask: {corpus} has no index yet, and --model is not given",
                    fix="name the model that was trained on this corpus with --model; or, to have a small "
                    "one trained on it first, add --train",
                )
        try:
            session = api.prepare(
                [corpus],
                place,
                reading=reading,
                training=train_settings(),
                calibration=settled(CalibrationOptions, {}),
                say=note,
            )
            return session
        except IndexMismatch as error:
            if place.model.place is None:
                raise
            raise IndexMismatch(
                f"index '{place.index}' was built for another model than {place.model.place}: "
                f"{error.message}",
                fix="leave out --model to ask the one that it was built for; or have one built for this "
                "model: --index OTHER.stride",
            ) from None

    # a bad record and a bad prompt are told alike
    reading = replace(reading, on_bad="error" if how.on_bad == "error" else "skip")
    last = answer_prompts(prompts or [], file, question, options, how, opened)
    if session and last is not None and question == QuestionOptions() and not options.chat and not how.pool:
        _next(last, session)


def _next(answer: Answer, session: Session) -> None:
    """Name the command that puts an answer to the test, where its model can be trained again."""
    from stride_cli.models.language.language_recipe import read_recipe

    path, sure = session.model.path, answer.verdict is not None and answer.verdict.word != "guessing"
    if not sure or not answer.supporters or path is None or read_recipe(path) is None:
        return
    # three trainings of each set tell a rise that is worth it, in less than half of the default's time
    few = ("--seeds", "3", "--random", "2", "--top", "1")
    place = ("--index", str(session.index.path))
    next_step("stride", "verify-hit", answer.query.prompt, *place, *few, why="test it by retraining")


def beside(corpus: str, suffix: str) -> Path:
    """A place beside the corpus, named as it is."""
    path = Path(corpus)
    if not path.exists() and (glob.has_magic(corpus) or "://" in corpus):
        raise UsageError(
            f"'{corpus}' is no single file, beside which its index could be",
            fix="say where: --index corpus.stride (and --model for --train)",
        )
    while path.suffix.lower() in _SUFFIXES:
        path = path.with_suffix("")
    return path.with_name(path.name + suffix)


def _trained(corpus: str, model: str | None, read: ReadOptions, *, device: str) -> str:
    """The path of a model trained on the corpus: one that is there, or a new one.

    Raises
    ------
    UsageError      what is there was not trained on this corpus
    """
    from stride_cli import output
    from stride_cli.commands.model import show_ending
    from stride_cli.training.options import TrainOptions

    out = beside(corpus, ".model") if model is None else Path(model)
    with output.progress("making a model"):
        from stride_cli.models.language.language_recipe import read_recipe
        from stride_cli.training.ending import look_at
        from stride_cli.training.pretraining import train_model
        from stride_cli.training.runs import read_corpus

        if out.exists():
            recipe = read_recipe(out)
            if recipe is None or recipe.corpus["fingerprint"] != read_corpus([corpus], read).fingerprint:
                raise UsageError(
                    f"the model at '{out}' was not trained on {corpus} as it is now",
                    fix="leave out --train to ask it as it is; or --model OTHER, where a new one goes",
                )
            return str(out)
        output.note(f"training a small model on {corpus}, at {out}")
        ending = look_at(train_model([corpus], out, TrainOptions(device=device), reading=read))
    show_ending(ending)
    return str(out)
