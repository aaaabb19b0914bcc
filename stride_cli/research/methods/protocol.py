"""The interface of every attribution method: fitted once, then scored query by query."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from types import NoneType
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from stride_cli.data.query_set import QUERY_BLOCK
from stride_cli.models.kinds import refuse_classifier
from stride_cli.options import entries

if TYPE_CHECKING:
    from stride_cli.data.query_set import QuerySet
    from stride_cli.data.workspace import Workspace


TEXT_BLOCK = 4096  # chunks decoded at once


class Method(Protocol):
    """An attribution method.

    Attributes
    ----------
    name : str             as on the command line
    bytes_per_chunk : float
        What `fit` left for later queries, in bytes per chunk; 0 where a query needs only the corpus itself.

    A class may set ``shares_a_pass = True``: all queries of one call of `score` share passes over the corpus,
    which are most of its cost.
    """

    name: str
    bytes_per_chunk: float

    def fit(self, workspace: Workspace) -> None:
        """Do once whatever does not depend on the queries."""
        ...

    def score(self, queries: QuerySet) -> Iterator[np.ndarray]:
        """Influence of every chunk on every query, block after block in the order of the queries.

        Yields
        ------
        ndarray (q, n) float32, q ≤ QUERY_BLOCK
            Positive where training on the chunk lowers the loss on the query; units differ by method.
        """
        ...


def require_text(workspace: Workspace, method: str) -> None:
    """Raise UsageError for a workspace that is not one of language, naming the method."""
    fix = "choose a method that reads the model: stride baseline --list"
    refuse_classifier(workspace.index, f"'{method}' compares texts", fix=fix)


def chunk_texts(workspace: Workspace) -> Iterator[str]:
    """The text of every chunk, in order, decoded block by block."""
    for start in range(0, workspace.n_chunks, TEXT_BLOCK):
        yield from workspace.texts(np.arange(start, min(start + TEXT_BLOCK, workspace.n_chunks)))


def query_blocks(queries: QuerySet) -> Iterator[np.ndarray]:
    """Yield the rows of the queries, at most QUERY_BLOCK at a time, as (q,) int64."""
    for start in range(0, len(queries), QUERY_BLOCK):
        yield np.arange(start, min(start + QUERY_BLOCK, len(queries)))


def in_blocks(scores: np.ndarray) -> Iterator[np.ndarray]:
    """Yield scores (Q, n) as blocks of at most QUERY_BLOCK rows."""
    for start in range(0, len(scores), QUERY_BLOCK):
        yield scores[start : start + QUERY_BLOCK]


def takes(*classes: type, leave_out: Sequence[str] = ()) -> Callable[[Any], Any]:
    """Gives a function that takes ``**given`` the options of these dataclasses in its signature."""

    def decorate(function: Any) -> Any:
        signature = inspect.signature(function)
        parameters = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        known, keyword = entries(*classes).items(), inspect.Parameter.KEYWORD_ONLY
        declared = {name: each for name, each in known if name not in leave_out and each.about.help}
        for name, entry in declared.items():
            if name not in signature.parameters:
                kinds = " | ".join("None" if k is NoneType else k.__name__ for k in entry.kinds)
                parameters.append(inspect.Parameter(name, keyword, default=entry.default, annotation=kinds))
        function.__signature__ = signature.replace(parameters=parameters)
        function.declared = declared
        return function

    return decorate
