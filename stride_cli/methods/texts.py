"""Texts of chunks and queries, decoded in the same way, so that the same tokens are the same text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from stride_cli.errors import UsageError

if TYPE_CHECKING:
    from stride_cli.data.query_set import QuerySet
    from stride_cli.methods.protocol import Task

TEXT_BLOCK = 4096  # chunks decoded at once


def require_text(task: Task, method: str) -> None:
    """Refuse a task that is not one of language, naming the method.

    Raises
    ------
    UsageError
    """
    if not task.is_language:
        raise UsageError(
            f"'{method}' compares texts, and this index holds a classifier's examples",
            fix="choose a method that reads the model: stride baseline --list",
        )


def chunk_texts(task: Task) -> Iterator[str]:
    """The text of every chunk, in order, decoded block by block."""
    for start in range(0, task.n_chunks, TEXT_BLOCK):
        yield from task.texts(np.arange(start, min(start + TEXT_BLOCK, task.n_chunks)))


def query_texts(task: Task, queries: QuerySet, rows: np.ndarray | range) -> list[str]:
    """The text of the given queries: their token ids decoded, as those of chunks are."""
    tokenizer = task.model.tokenizer
    return [str(tokenizer.decode(queries.ids[int(row)], skip_special_tokens=True)) for row in rows]
