"""Examples of a classifier as queries: which training rows made the model say this label?"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from stride_cli.data.queries import Query, compared
from stride_cli.data.query_set import QuerySet
from stride_cli.errors import QueryError
from stride_cli.models.classifier.classifier_model import ClassifierModel
from stride_cli.models.classifier.directory import find_row

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

HELD_OUT = "held-out"
PREDICTED = "predicted"


def row_query(
    model: ClassifierModel, row: str | int, *, label: str | None = None, instead: str | None = None
) -> Query:
    """A row of the index's file as a query.

    Parameters
    ----------
    row : number (from 0) or id
    label : str, optional      whose loss is attributed: a class, or "predicted"; default: the row's own
    instead : str, optional    a class that it might have been: the query is compared with that

    Raises
    ------
    QueryError      no such row or class
    """
    queries = queries_of_rows(model, [find_row(model, row)])
    return next(_labelled(model, queries, label=label, instead=instead))


def asked_examples(
    model: ClassifierModel, row: str | None, file: Path | None, label: str | None, instead: str | None = None
) -> Iterator[Query]:
    """Examples that a user asks about: one row, ``held-out``, or those of a file; see `row_query`.

    Where a file has no labels, they are the model's own predictions, and the queries say ``generated``.

    Parameters
    ----------
    row : number or id, or "held-out"; None: `file` has them
    """
    if file is None and row != HELD_OUT:
        assert row is not None
        yield row_query(model, row, label=label, instead=instead)
        return
    queries, predicted = _read(model, HELD_OUT if file is None else file)
    for query in _labelled(model, queries, label=label, instead=instead):
        yield replace(query, generated=query.generated or (predicted and label is None))


def _labelled(
    model: ClassifierModel, queries: QuerySet, *, label: str | None, instead: str | None = None
) -> Iterator[Query]:
    """Queries as `Session.query` takes them; `generated` where the label is the model's own prediction."""
    if label is not None and label != PREDICTED and label not in model.classes:
        raise QueryError(
            f"'{label}' is no class of the model (its classes are {', '.join(model.classes[:12])}"
            + (" …)" if len(model.classes) > 12 else ")"),
            fix="give a class, or 'predicted'",
        )
    others = None if instead is None else _labelled(model, queries, label=instead)
    for name, ids, weights in zip(queries.names, queries.ids, queries.weights, strict=True):
        own = int(ids[1])
        if label == PREDICTED:
            own = int(model.predict(torch.from_numpy(ids)[None])[0].argmax())
        elif label is not None:
            own = model.classes.index(label)
        prompt, response = f"row {name} → ", model.classes[own]
        query = Query(prompt, response, np.array([ids[0], own]), weights, label == PREDICTED)
        yield (
            query if others is None else compared(query, next(others), lambda each: str(model.classes[each]))
        )


def register(
    model: ClassifierModel,
    inputs: np.ndarray,
    labels: Sequence[int] | np.ndarray,
    names: Sequence[str] | None = None,
) -> QuerySet:
    """Append inputs to a classifier's table, as queries.

    Parameters
    ----------
    inputs : (Q, …)        as in the training file: not standardised
    labels : (Q,) ints     whose loss is attributed
    names : Q strings, optional

    Raises
    ------
    QueryError      inputs of another shape, not finite; labels that are no classes
    """
    inputs = np.asarray(inputs)
    model.check_shape(inputs.shape[1:], "the queries' inputs")
    if not np.isfinite(inputs).all():
        raise QueryError("a query's input has a value that is not finite", fix="fill missing values in")
    numbers = model.table.add(inputs)
    return _queries(model, numbers, np.asarray(labels), names or [f"input {n}" for n in numbers])


def queries_of_rows(model: ClassifierModel, rows: Sequence[int] | np.ndarray) -> QuerySet:
    """Rows of the index's file as queries, with their own labels.

    Raises
    ------
    QueryError      no such row
    """
    rows = np.asarray(rows, np.int64)
    if len(rows) and not (rows.min() >= 0 and rows.max() < len(model.table.data)):
        raise QueryError(
            f"there is no row {rows.min() if rows.min() < 0 else rows.max()} (the file has "
            f"{len(model.table.data):,}, numbered from 0)",
            fix="give the number or id of a row",
        )
    names = [model.row_ids[row] for row in rows.tolist()]
    return _queries(model, model.table.of_rows(rows), model.row_labels[rows], names)


def read_examples(model: ClassifierModel, source: str | Path) -> QuerySet:
    """Queries from ``held-out`` (rows kept back at training) or from a file like the training file.

    Raises
    ------
    QueryError, CorpusError      no row was held out; the file cannot be read, or has other inputs
    """
    return _read(model, source)[0]


def _read(model: ClassifierModel, source: str | Path) -> tuple[QuerySet, bool]:
    """As `read_examples`, and True where the file has no labels: they are the model's own predictions."""
    if str(source) == HELD_OUT and not Path(source).exists():
        if len(model.held_out) == 0:
            raise QueryError(
                "no row was held out when the model was trained", fix="train with --holdout, or give queries"
            )
        return queries_of_rows(model, model.held_out), False
    if model.read_file is None:
        raise QueryError("this model was not loaded from a directory", fix="use register()")
    inputs, labels, names = model.read_file(str(source))
    predicted = labels is None
    if labels is None:
        unknown = register(model, inputs, np.zeros(len(inputs), np.int64), names)
        labels = model.predict(torch.from_numpy(np.stack(unknown.ids))).argmax(1).cpu().numpy()
    return register(model, inputs, labels, names), predicted


def _queries(
    model: ClassifierModel, numbers: np.ndarray, labels: np.ndarray, names: Sequence[str]
) -> QuerySet:
    if len(labels) != len(numbers):
        raise QueryError(
            f"{len(numbers)} inputs have {len(labels)} labels (expected one for each)", fix="label each input"
        )
    for name, label in zip(names, labels.tolist(), strict=True):
        if not 0 <= label < model.vocab_size:
            raise QueryError(
                f"the label of query '{name}', {label}, is out of range (the model has "
                f"{model.vocab_size} classes)",
                fix="give the number of a class",
            )
    return QuerySet(
        [np.array(pair, np.int64) for pair in zip(numbers.tolist(), labels.tolist(), strict=True)],
        [np.array([0.0, 1.0], np.float32)] * len(numbers),
        names,
    )
