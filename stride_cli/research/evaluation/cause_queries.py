"""Queries whose causes are known: a file of JSON Lines, read against an index."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from stride_cli.characters import shortened
from stride_cli.corpus.readers import read_records
from stride_cli.data.query_files import named_file
from stride_cli.errors import CorpusError, QueryError

if TYPE_CHECKING:
    from index_format.reader import Index

_LINE = '{"id": "q1", "prompt": …, "response": …, "causes": ["a document\'s id", …]}'


@dataclass(frozen=True)
class CauseQuery:
    """One line of a file of queries.

    Attributes
    ----------
    id, prompt, response : str
    causes : (R,) int64       numbers of the documents that taught it, ascending
    where : str               file and line
    row : int                 which of the queries it is, from 0: where its scores stand in a file of scores
    instead : str, optional   what might have been said
    group : str, optional     queries of one group show the same
    """

    id: str
    prompt: str
    response: str
    causes: np.ndarray
    where: str
    row: int = 0
    instead: str | None = None
    group: str | None = None


def read_cause_queries(path: str | Path, index: Index, *, known: bool = True) -> list[CauseQuery]:
    """Read the queries of a file, with their causes found among the documents of an index.

    Parameters
    ----------
    known : every query has causes; else those that have none get (0,)

    Raises
    ------
    UsageError       there is no such file
    CorpusError      with file and line: a line that is none, lacks a field, has no cause or one twice; an id
                     that two queries have; no query at all
    QueryError       with file and line: a cause that is no document of the index, or all of them are
    """
    named_file(path)
    numbers = {index.document_id(number): number for number in range(index.n_documents)}
    found: list[CauseQuery] = []
    seen: dict[str, str] = {}
    for line, record in read_records(str(path)):
        where = f"{path}:{line}"
        name, prompt, response = (_text(record, key, where) for key in ("id", "prompt", "response"))
        if name in seen:
            raise CorpusError(
                f"{where}: id '{shortened(name, 60)}' is taken by {seen[name]}",
                fix="give every query its own id",
            )
        seen[name] = where
        causes = np.zeros(0, np.int64)
        if known or "causes" in record:
            causes = _causes(record, name, where, numbers, str(index.path))
        more = {key: _text(record, key, where) for key in ("instead", "group") if key in record}
        found.append(CauseQuery(name, prompt, response, causes, where, len(found), **more))
    if not found:
        raise CorpusError(f"{path}: there is no query in it", fix=f"one object a line: {_LINE}")
    return found


def _text(record: Mapping[str, Any], key: str, where: str) -> str:
    value = record.get(key)
    if key == "id" and isinstance(value, int) and not isinstance(value, bool):
        value = str(value)  # as a corpus's
    if not isinstance(value, str) or not value.strip():
        what = "is missing" if key not in record else f"is {shortened(repr(value), 40)}"
        raise CorpusError(f"{where}: '{key}' {what} (expected some text)", fix=f"one object a line: {_LINE}")
    return value


def _causes(
    record: Mapping[str, Any], name: str, where: str, numbers: Mapping[str, int], index: str
) -> np.ndarray:
    """Find the numbers of the documents that a record names, ascending."""
    given, query = record.get("causes"), f"{where}: query '{shortened(name, 60)}'"
    if not isinstance(given, list) or not given:
        what = "has no causes" if "causes" not in record or given == [] else "has causes that are no list"
        raise CorpusError(
            f"{query} {what} (expected ids of one document or more)",
            fix=f"name them, or leave this query out: {_LINE}",
        )
    ids = [str(cause) if isinstance(cause, int) and not isinstance(cause, bool) else cause for cause in given]
    for position, cause in enumerate(ids):
        if not isinstance(cause, str):
            raise CorpusError(
                f"{query} has the cause {shortened(repr(cause), 40)} (expected a document's id)",
                fix="give ids as they stand in the corpus",
            )
        if cause in ids[:position]:
            raise CorpusError(
                f"{query} names the cause '{shortened(cause, 60)}' twice", fix="name every cause once"
            )
        if cause not in numbers:
            near = difflib.get_close_matches(cause, numbers, 1)
            guess = f" (did you mean '{near[0]}'?)" if near else ""
            raise QueryError(
                f"{query} names the cause '{shortened(cause, 60)}', which is no "
                f"document of index '{index}'{guess}",
                fix=f"take the ids from the corpus of the index: stride index show --index {index}",
            )
    if len(ids) == len(numbers):
        raise QueryError(
            f"{query} names all {len(numbers):,} documents as causes: nothing is left to tell them from",
            fix="name those that taught it",
        )
    return np.sort(np.array([numbers[cause] for cause in ids], np.int64))
