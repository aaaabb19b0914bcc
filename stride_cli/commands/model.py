"""`stride model`: train and fine-tune models whose training set is known, and look at a checkpoint."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stride_cli import output
from stride_cli.characters import one_line
from stride_cli.commands.index import CorpusArgument
from stride_cli.commands.options import READING, Flags, Json, NewModel, Reading, named_model, with_flags
from stride_cli.commands.panels import CommandLine, example
from stride_cli.commands.tables import next_step, show_record
from stride_cli.corpus.readers import ReadOptions
from stride_cli.errors import UsageError
from stride_cli.models.kinds import is_examples
from stride_cli.models.spec import StreamOptions
from stride_cli.options import own, refuse_foreign
from stride_cli.schema.derivation import to_record
from stride_cli.training.options import ClassifierOptions, ColumnOptions, FinetuneOptions, TrainOptions

if TYPE_CHECKING:
    from stride_cli.schema.model_records import ModelRecord
    from stride_cli.training.ending import Ending
    from stride_cli.training.runs import Trained

# options that no corpus of texts has use for: they tell that a classifier is wanted
_TELLING = ("network", "label", "rows", "holdout")

app = CommandLine(help="Train a language model on a corpus, fine-tune one, or look at one.")

OutOption = Annotated[Path, typer.Option("--out", metavar="DIR", help="Where the model goes.")]
OverwriteOption = Annotated[
    bool, typer.Option("--overwrite", help="Replace the model, or discard an unfinished training, at DIR.")
]


@app.command(
    short_help="Train a small model, with a tokenizer of its own.",
    epilog=example(
        "stride model train corpus.jsonl --out model",
        "stride model train corpus.jsonl --out model --layers 6 --width 256 --epochs 10 --checkpoints 4",
        "stride model train mnist.npz --out model --network mlp --rows 2000 --holdout 100",
        "stride model train table.csv --out model --network mlp --field label=status --field id=name",
    ),
)
@with_flags
def train(
    corpus: CorpusArgument,
    *,
    out: OutOption = Path("model"),
    given: Annotated[
        dict[str, Any],
        Flags(
            TrainOptions,
            ClassifierOptions,
            ColumnOptions,
            *READING,
            first=("layers", "width", "heads", "vocab", "context"),
            network={"default": None},
            leave_out=("schedule", "batch_size", "weight_decay"),
        ),
    ],
    overwrite: OverwriteOption = False,
    json: Json = None,
) -> None:
    """Train a NanoChat model, with a tokenizer of its own, on a corpus; or a classifier on examples.

    Size and length of the training fit the corpus: about a hundred documents take well under a minute. The
    recipe is stored with the model. Interrupted, the same command goes on where it was.

    A .npz of inputs and labels, or a table with --field label= or --network, gives a classifier.
    """
    begin = time.monotonic()
    language, examples = (TrainOptions, *READING), (ClassifierOptions, ColumnOptions)
    if any(is_examples(source) for source in corpus) or any(given.get(name) for name in _TELLING):
        refuse_foreign(
            given,
            examples,
            language,
            because=f"of language models, and {corpus[0]} is read as examples of a classifier",
            otherwise="give a corpus of texts",
        )
        _train_classifier(corpus, out, given, overwrite=overwrite, json=json)
        return
    refuse_foreign(
        given,
        language,
        examples,
        because=f"of classifiers, and {corpus[0]} is read as a corpus of texts",
        otherwise="give a .npz of examples, or a table with --field label=",
    )
    with output.progress("making a model"):
        from stride_cli.training.ending import look_at
        from stride_cli.training.pretraining import train_model

        options = TrainOptions(**own(TrainOptions, given))
        trained = train_model(corpus, out, options, reading=ReadOptions.of(given), overwrite=overwrite)
        ending = look_at(trained)
    _report(trained, time.monotonic() - begin, json, ending)
    show_ending(ending)
    _next(corpus, out)


def _train_classifier(
    sources: Sequence[str], out: Path, given: Mapping[str, Any], *, overwrite: bool, json: bool | None
) -> None:
    """Train a classifier and say what came out; `given` are options of `ClassifierOptions` and
    `ColumnOptions`."""
    if len(sources) != 1:
        raise UsageError(
            f"a classifier is trained on one file (found {len(sources)})", fix="join the files into one"
        )
    chosen = own(ClassifierOptions, given)
    epochs = chosen.get("epochs", 1)
    if epochs != int(epochs):
        raise UsageError(
            f"--epochs is {epochs}, expected a whole number for a classifier",
            fix=f"try --epochs {max(1, round(epochs))}",
        )
    if "epochs" in chosen:
        chosen["epochs"] = int(epochs)
    options, columns = ClassifierOptions(**chosen), ColumnOptions(**own(ColumnOptions, given))
    from stride_cli.models.classifier.examples import Columns
    from stride_cli.training.classifiers import train_classifier

    trained = train_classifier(
        sources[0],
        out,
        options,
        columns=Columns(label=columns.label, id=columns.id, drop=tuple(columns.drop)),
        overwrite=overwrite,
    )
    show_record(to_record(trained), json, title="model")
    next_step("stride", "index", "build", str(sources[0]), "--model", str(out))


@app.command(
    short_help="Fine-tune a model, where there are answers on these only.",
    epilog=example(
        "stride model finetune answers.jsonl --model model --out tuned",
        "stride model finetune answers.jsonl --model model --out tuned --lora 16 --epochs 2",
    ),
)
@with_flags
def finetune(
    corpus: CorpusArgument,
    *,
    model: Annotated[str, NewModel],
    out: OutOption,
    options: Annotated[FinetuneOptions, Flags(FinetuneOptions, first=("lora_rank",))],
    overwrite: OverwriteOption = False,
    json: Json = None,
    reading: Reading,
) -> None:
    """Fine-tune a model: on the answers only, where documents are prompts with responses or conversations.

    Low-rank changes are merged: DIR is a whole model. Interrupted, the same command goes on where it was.
    """
    begin = time.monotonic()
    with output.progress("fine-tuning the model"):
        from stride_cli.training.finetuning import finetune_model

        trained = finetune_model(
            corpus, named_model(model), out, options, reading=reading, overwrite=overwrite
        )
    _report(trained, time.monotonic() - begin, json)
    if trained.before is not None and trained.loss > trained.before / 2:
        moved = f"{trained.result.steps} steps took its loss from {trained.before:.2f} to {trained.loss:.2f}"
        output.note(
            f"warning: it has hardly learnt its corpus: {moved}; give more --epochs, or a larger --lr"
        )
    _next(corpus, out)


@app.command(
    short_help="What a checkpoint is, and how it was trained.",
    epilog=example("stride model info model", "stride model info model --json | jq .recipe"),
)
@with_flags
def info(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Checkpoint directory, .gguf file or hub id.")
    ],
    *,
    held: Annotated[StreamOptions, Flags(StreamOptions)],
    json: Json = None,
) -> None:
    """Describe a checkpoint: architecture, size, fingerprints, and how STRIDE trained it, if it did."""
    from stride_cli.models.loading import describe_model

    show_record(describe_model(replace(named_model(model), stream=held.stream)), json, title=model)


def _next(corpus: list[str], out: Path) -> None:
    if len(corpus) == 1 and corpus[0] != "-":
        next_step("stride", "ask", corpus[0], "--model", str(out), "…")
    else:
        next_step("stride", "index", "build", *corpus, "--model", str(out))


def show_ending(ending: Ending) -> None:
    """Show on stderr how a trained model goes on, and what to know before asking it."""
    output.note("it goes on from beginnings of its corpus:")
    for beginning, continuation in ending.continuations:
        output.note(f"  {one_line(beginning)} … {one_line(continuation).strip() or '(nothing)'}")
    if warning := ending.warning():
        output.note(f"warning: {warning}")


def _report(trained: Trained, seconds: float, json: bool | None, ending: Ending | None = None) -> None:
    record: ModelRecord = {
        "schema": "stride.model/1",
        "path": str(trained.path),
        "parameters": trained.parameters,
        "loss": trained.loss,
        "steps": trained.result.steps,
        "epochs": trained.recipe.epochs,
        "tokens": trained.recipe.corpus["tokens"],
        "documents": trained.recipe.corpus["documents"],
        "chunks": trained.recipe.corpus["chunks"],
        "seconds": seconds,
    }
    if trained.before is not None:
        record["loss_before"] = trained.before
    if ending is not None:
        record["entropy"], record["pairs_alone"] = ending.entropy, ending.alone
        record["speaks"] = ending.warning() is None
        if output.wants_json(json):  # a person is told them below
            record["continuations"] = [
                {"beginning": beginning, "continuation": said} for beginning, said in ending.continuations
            ]
    show_record(record, json, title="model")
