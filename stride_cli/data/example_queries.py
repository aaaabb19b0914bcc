"""One example of a classifier as a query: which training rows made the model say this label?"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from stride_cli.data.queries import Query
from stride_cli.data.query_set import QuerySet
from stride_cli.errors import QueryError
from stride_cli.models.classifier.classifier_model import HELD_OUT, ClassifierModel
from stride_cli.models.classifier.directory import find_row

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["HELD_OUT", "PREDICTED", "example_queries", "file_queries", "own_inputs", "row_query"]
PREDICTED = "predicted"


def row_query(model: ClassifierModel, row: str | int, *, label: str | None = None) -> Query:
    """A row of the index's file as a query.

    Parameters
    ----------
    row : number (from 0) or id
    label : str, optional      whose loss is attributed: a class, or "predicted"; default: the row's own

    Raises
    ------
    QueryError      no such row or class
    """
    number = find_row(model, row)
    return example_queries(model, model.queries_of_rows([number]), label=label)[0]


def file_queries(model: ClassifierModel, source: str, *, label: str | None = None) -> Iterator[Query]:
    """The examples of a file (or ``held-out``), one query each; see `row_query`.

    Where the file has no labels, they are the model's own predictions, and the queries say ``generated``.
    """
    queries, predicted = model.labelled_queries(source)
    for query in example_queries(model, queries, label=label):
        yield replace(query, generated=query.generated or (predicted and label is None))


def example_queries(model: ClassifierModel, queries: QuerySet, *, label: str | None = None) -> list[Query]:
    """Queries as `Session.query` takes them; `generated` where the label is the model's own prediction."""
    if label is not None and label != PREDICTED and label not in model.classes:
        raise QueryError(
            f"'{label}' is no class of the model (its classes are {', '.join(model.classes[:12])}"
            + (" …)" if len(model.classes) > 12 else ")"),
            fix="give a class, or 'predicted'",
        )
    found = []
    for name, ids, weights in zip(queries.names, queries.ids, queries.weights, strict=True):
        own = int(ids[1])
        if label == PREDICTED:
            own = int(model.predict(torch.from_numpy(ids)[None])[0].argmax())
        elif label is not None:
            own = model.classes.index(label)
        prompt, response = f"row {name} → ", model.classes[own]
        found.append(Query(prompt, response, np.array([ids[0], own]), weights, label == PREDICTED))
    return found


def own_inputs(model: ClassifierModel, queries: QuerySet) -> tuple[QuerySet, np.ndarray]:
    """What keeps queries from a file of their own readable when the model is opened again.

    Returns
    -------
    (queries, inputs (A, …) float64) : the inputs that are in no row of the index's file, each once, and the
    queries numbered as a fresh table numbers them once these inputs are the first that it is given
    """
    table = model.table
    first = table.n_chunks + len(table.data)
    numbers = [int(ids[0]) for ids in queries.ids]
    added = list(dict.fromkeys(number for number in numbers if number >= first))
    if not added:
        return queries, np.zeros((0, *model.shape))
    place = {number: first + row for row, number in enumerate(added)}
    renumbered = QuerySet(
        [np.array([place.get(int(ids[0]), int(ids[0])), int(ids[1])]) for ids in queries.ids],
        queries.weights,
        queries.names,
        queries.texts,
    )
    return renumbered, np.asarray(table.take(np.array(added)), np.float64)
