"""`stride model train` and `stride query` for classifiers: from options to functions, results to stdout."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stride_cli.commands.next_steps import next_step
from stride_cli.errors import UsageError
from stride_cli.models.kinds import is_examples
from stride_cli.options import own
from stride_cli.training.options import ClassifierOptions, ColumnOptions

if TYPE_CHECKING:
    from stride_cli.api import Session
    from stride_cli.data.queries import Query
    from stride_cli.schema.model_records import ClassifierRecord

_TELLING = ("network", "label", "rows", "rows_file", "holdout")  # options that no corpus of texts has use for


def wants_classifier(sources: Sequence[str], given: Mapping[str, Any]) -> bool:
    """Whether `stride model train` is asked for a classifier: by its file, or by an option of classifiers."""
    return any(is_examples(source) for source in sources) or any(given.get(name) for name in _TELLING)


def train_classifier(
    sources: Sequence[str], out: Path, given: Mapping[str, Any], *, overwrite: bool, json: bool
) -> None:
    """Train a classifier and say what came out; `given` are options of `ClassifierOptions` and
    `ColumnOptions`."""
    if len(sources) != 1:
        raise UsageError(
            f"a classifier is trained on one file (found {len(sources)})", fix="join the files into one"
        )
    chosen = own(ClassifierOptions, given)
    epochs = chosen.get("epochs")
    if epochs is not None:
        if epochs != int(epochs):
            raise UsageError(
                f"--epochs is {epochs}, expected a whole number for a classifier",
                fix=f"try --epochs {max(1, round(epochs))}",
            )
        chosen["epochs"] = int(epochs)
    options, columns = ClassifierOptions(**chosen), ColumnOptions(**own(ColumnOptions, given))
    from stride_cli.commands.tables import show_record
    from stride_cli.models.classifier.examples import Columns
    from stride_cli.training.classifiers import train_classifier

    begin = time.monotonic()
    trained = train_classifier(
        sources[0],
        out,
        options,
        columns=Columns(label=columns.label, id=columns.id, drop=tuple(columns.drop)),
        overwrite=overwrite,
    )
    record: ClassifierRecord = {
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
    next_step("stride", "index", "build", str(sources[0]), "--model", str(out))


def classifier_queries(
    session: Session, row: str | None, file: Path | None, label: str | None, instead: str | None = None
) -> Iterator[Query]:
    """The examples that `stride query` is asked about: one row, ``held-out``, or those of a file; where a
    class is given that they might have been `instead`, compared with that."""
    from stride_cli.data.example_queries import HELD_OUT, file_queries, row_query
    from stride_cli.data.queries import compared

    model: Any = session.model
    if instead is not None:
        own, others = (classifier_queries(session, row, file, each) for each in (label, instead))
        for query, other in zip(own, others, strict=True):
            yield compared(query, other, lambda found: str(model.classes[found]))
    elif file is not None:
        yield from file_queries(model, str(file), label=label)
    elif row == HELD_OUT:
        yield from file_queries(model, HELD_OUT, label=label)
    else:
        assert row is not None
        yield row_query(model, row, label=label)
