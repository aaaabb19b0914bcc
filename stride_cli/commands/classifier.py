"""`stride model train` and `stride query` for classifiers: from options to functions, results to stdout."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stride_cli import output
from stride_cli.commands.completion import NETWORKS, one_of
from stride_cli.errors import UsageError
from stride_cli.models.kinds import is_examples

if TYPE_CHECKING:
    from stride_cli.api import Session
    from stride_cli.data.queries import Query

PANEL = "Classifiers (a file of examples)"


def _option(name: str, help: str, **more: Any) -> Any:
    return typer.Option(name, help=help, rich_help_panel=PANEL, **more)


Network = Annotated[
    str | None,
    _option(
        "--network",
        "mlp, resnet9, logistic, or a file FILE.py that defines network(shape, n_classes).",
        autocompletion=one_of(*NETWORKS),
    ),
]
Label = Annotated[str | None, _option("--label", "Column of the labels, in a table.")]
IdColumn = Annotated[str | None, _option("--id-column", "Column of the ids; default: rows are numbered.")]
Drop = Annotated[list[str] | None, _option("--drop", "A column that is no input; may be repeated.")]
Rows = Annotated[int | None, _option("--rows", "Train on so many rows; default: all that are not held out.")]
RowsFrom = Annotated[
    Path | None, _option("--rows-from", "A .npy of row numbers, or a mask over the rows, to train on.")
]
Holdout = Annotated[int, _option("--holdout", "So many other rows are kept as queries.")]
Shuffle = Annotated[bool, _option("--shuffle", "Draw the rows by the seed, instead of the first ones.")]
Weights = Annotated[
    Path | None, _option("--weights", "A state dict to start from; with --epochs 0, used as it is.")
]
BatchSize = Annotated[int | None, _option("--batch-size", "Rows of a batch; default 64.")]
WeightDecay = Annotated[float | None, _option("--weight-decay", "Default: what suits the network.")]


def wants_classifier(sources: Sequence[str], given: dict[str, Any]) -> bool:
    """Whether `stride model train` is asked for a classifier: by its file, or by an option of classifiers."""
    return any(is_examples(source) for source in sources) or any(given.values())


def train_classifier(
    sources: Sequence[str], out: Path, *, overwrite: bool, json: bool, columns: dict[str, Any], **options: Any
) -> None:
    """Train a classifier and say what came out."""
    from stride_cli.commands.tables import show_record
    from stride_cli.models.classifier.examples import Columns
    from stride_cli.training.classifiers import ClassifierOptions, train_classifier

    if len(sources) != 1:
        raise UsageError(
            f"a classifier is trained on one file (found {len(sources)})", fix="join the files into one"
        )
    epochs = options.pop("epochs")
    if epochs is not None and epochs != int(epochs):
        raise UsageError(f"--epochs is {epochs}, expected a whole number for a classifier")
    begin = time.monotonic()
    trained = train_classifier(
        sources[0],
        out,
        ClassifierOptions(epochs=None if epochs is None else int(epochs), **options),
        columns=Columns(**columns),
        overwrite=overwrite,
    )
    record = {
        "schema": "stride.classifier/1",
        "path": str(trained.path),
        "network": trained.recipe.network.name,
        "parameters": trained.parameters,
        "classes": trained.classes,
        "rows": trained.rows,
        "loss": trained.loss,
        "accuracy": trained.accuracy,
        "held_out": trained.held_out,
        "held_out_loss": trained.held_out_loss,
        "held_out_accuracy": trained.held_out_accuracy,
        "epochs": trained.recipe.epochs,
        "seconds": time.monotonic() - begin,
    }
    show_record(record, json, title="model")
    output.note(f"next: stride index build {sources[0]} --model {out}")


def classifier_queries(
    session: Session, row: str | None, file: Path | None, label: str | None
) -> Iterator[Query]:
    """The examples that `stride query` is asked about: one row, ``held-out``, or those of a file."""
    from stride_cli.data.example_queries import HELD_OUT, file_queries, row_query

    model: Any = session.model
    if file is not None:
        yield from file_queries(model, str(file), label=label)
    elif row == HELD_OUT:
        yield from file_queries(model, HELD_OUT, label=label)
    else:
        assert row is not None
        yield row_query(model, row, label=label)
