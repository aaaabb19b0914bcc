"""Scores of documents as DATE-LM exchanges them: JSON, a list over queries of lists over documents; or one
list over documents that holds for all queries together."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from index_format.durable import make_directory, replace_file
from stride_cli.characters import shortened
from stride_cli.errors import CorpusError, UsageError, first_line

_LARGEST = 1e300  # JSON has whole numbers of any length


def read_scores(path: str | Path, n_queries: int, n_documents: int) -> list[np.ndarray | None]:
    """Read the scores of a file, (D,) float64 of every query; None where a row is null.

    Parameters
    ----------
    n_queries, n_documents : how many lists, and of what length. A single list of numbers holds for every
        query.

    Raises
    ------
    UsageError       there is no such file
    CorpusError      with file and place: no JSON, no list of lists; another number of them; a score that is
                     no finite number
    """
    if not Path(path).is_file():
        raise UsageError(f"there is no file '{path}'", fix="give the path of a JSON file of scores")
    expected = f"a list of {n_queries:,} lists, one a query, of {n_documents:,} scores, one a document"
    try:
        given = json.loads(Path(path).read_bytes())
    except (ValueError, RecursionError) as error:
        raise CorpusError(
            f"{path}: expected JSON, found: {first_line(error)}", fix=f"write scores as {expected}"
        ) from None
    if not isinstance(given, list) or not given:
        raise CorpusError(
            f"{path}: found {shortened(repr(given), 40)} (expected {expected})",
            fix="write a list of lists as JSON",
        )
    if not any(isinstance(row, list) for row in given) and any(row is not None for row in given):
        return [_row(given, n_documents, str(path))] * n_queries
    if len(given) != n_queries:
        first = next((row for row in given if isinstance(row, list)), [])
        turned = len(given) == n_documents and len(first) == n_queries
        raise CorpusError(
            f"{path}: found {len(given):,} lists (expected {expected})",
            fix="write it the other way round: lists over queries, of lists over documents"
            if turned
            else "score every query of the file, in its order",
        )
    return [
        None if row is None else _row(row, n_documents, f"{path}: list {number}")
        for number, row in enumerate(given)
    ]


def _row(given: object, n_documents: int, where: str) -> np.ndarray:
    if not isinstance(given, list) or len(given) != n_documents:
        found = f"{len(given):,} scores" if isinstance(given, list) else shortened(repr(given), 40)
        raise CorpusError(
            f"{where}: found {found} (expected {n_documents:,}, one of every document)",
            fix="score every document of the corpus, in its order",
        )
    for place, value in enumerate(given):
        if type(value) not in (int, float) or not abs(value) < _LARGEST:
            raise CorpusError(
                f"{where}: score {place} is {shortened(repr(value), 40)} (expected a finite number)",
                fix="score what cannot be scored with 0, or as the lowest",
            )
    return np.array(given, np.float64)


def scores_path(folder: Path, method: str) -> Path:
    """Name the file of a method's scores in a directory."""
    return folder / (re.sub(r"[^\w.=,-]+", "_", method) + ".json")


def write_scores(path: Path, rows: Sequence[np.ndarray | None], *, one_list: bool = False) -> None:
    """Write float32 scores of every query, (D,) each; None is a query that was not scored: null.

    `one_list`: their mean over the queries that were, a single list.
    """
    if one_list:
        text = _list(np.stack([row for row in rows if row is not None]).mean(axis=0, dtype=np.float64))
    else:
        text = "[" + ",\n".join("null" if row is None else _list(row) for row in rows) + "]"
    make_directory(path.parent)
    replace_file(path, (text + "\n").encode())


def _list(row: np.ndarray) -> str:
    # nine digits are any float32
    return "[" + ", ".join(f"{value:.9g}" for value in row.tolist()) + "]"
