"""Texts of chunks and queries, decoded in the same way, so that the same tokens are the same text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from stride_cli.models.kinds import refuse_classifier

if TYPE_CHECKING:
    from stride_cli.data.query_set import QuerySet
    from stride_cli.data.workspace import Workspace

TEXT_BLOCK = 4096  # chunks decoded at once


def require_text(workspace: Workspace, method: str) -> None:
    """Refuse a workspace that is not one of language, naming the method.

    Raises
    ------
    UsageError
    """
    fix = "choose a method that reads the model: stride baseline --list"
    refuse_classifier(workspace.index, f"'{method}' compares texts", fix=fix)


def chunk_texts(workspace: Workspace) -> Iterator[str]:
    """The text of every chunk, in order, decoded block by block."""
    for start in range(0, workspace.n_chunks, TEXT_BLOCK):
        yield from workspace.texts(np.arange(start, min(start + TEXT_BLOCK, workspace.n_chunks)))


def query_texts(workspace: Workspace, queries: QuerySet, rows: np.ndarray | range) -> list[str]:
    """The text of the given queries: their token ids decoded, as those of chunks are."""
    tokenizer = workspace.model.tokenizer
    return [str(tokenizer.decode(queries.ids[int(row)], skip_special_tokens=True)) for row in rows]
