"""Inputs that are kept beside queries whose tokens do not hold them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stride_cli.data.query_set import QuerySet

if TYPE_CHECKING:
    from index_format.reader import Index
    from stride_cli.models.protocol import AttributableModel


def register_inputs(index: Index, model: AttributableModel) -> None:
    """Give a model, just opened, the inputs of the truth's queries that are no rows of the index's file.

    Nothing where there is no truth, or none such. Queries of the truth are then known by their numbers.
    """
    if model.table is None or not index.has("truth"):
        return
    if "truth/query_inputs" in index.names("truth"):
        model.table.add(np.asarray(index.array("truth/query_inputs")))


def own_inputs(model: AttributableModel, queries: QuerySet) -> tuple[QuerySet, np.ndarray | None]:
    """Keep queries of a file of their own readable when the model is opened again.

    Returns
    -------
    (queries, inputs (A, …) float64 or None) : the inputs that are in no row of the index's file, each once,
    and the queries numbered as a fresh table numbers them once these inputs are the first that it is given
    """
    table = model.table
    if table is None:
        return queries, None
    first = table.n_chunks + len(table.data)
    numbers = [int(ids[0]) for ids in queries.ids]
    added = list(dict.fromkeys(number for number in numbers if number >= first))
    if not added:
        return queries, None
    place = {number: first + row for row, number in enumerate(added)}
    renumbered = QuerySet(
        [np.array([place.get(int(ids[0]), int(ids[0])), int(ids[1])]) for ids in queries.ids],
        queries.weights,
        queries.names,
        queries.texts,
    )
    return renumbered, np.asarray(table.take(np.array(added)), np.float64)
