"""What every attribution method is to the evaluation: fitted once on a task, then scored query by query."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from stride_cli.errors import UsageError

if TYPE_CHECKING:
    from index_format.reader import Index
    from stride_cli.data.batches import ChunkReader
    from stride_cli.data.query_set import QuerySet
    from stride_cli.models.language.causal_lm import CausalLM

QUERY_BLOCK = 32  # rows of one block of scores


@dataclass(frozen=True)
class Task:
    """A frozen model and the chunks it was (or may have been) trained on.

    Attributes
    ----------
    index : Index
    model : CausalLM
        Or a classifier with the same interface: hidden, continue_from, logits, and `.model`, the module.
    chunks : ChunkReader       the n chunks; batches of ids and loss weights
    seed : int                 names every random stream (`stride_cli.randomness.stream`)
    """

    index: Index
    model: CausalLM
    chunks: ChunkReader
    seed: int

    @property
    def n_chunks(self) -> int:
        return int(self.chunks.n_chunks)

    def texts(self, rows: np.ndarray) -> list[str]:
        """The given chunks as text.

        Raises
        ------
        UsageError      the task is not one of language
        """
        if not self.is_language:
            raise UsageError(
                "this method reads text, and the index holds no text", fix="choose another method"
            )
        tokenizer = self.model.tokenizer
        return [
            str(tokenizer.decode(self.chunks.chunk(int(row))[0], skip_special_tokens=True)) for row in rows
        ]

    @property
    def is_language(self) -> bool:
        """Whether chunks are text."""
        return self.index.attributes.get("config", {}).get("kind", "language") == "language"


class Method(Protocol):
    """An attribution method.

    Attributes
    ----------
    name : str             as on the command line
    bytes_per_chunk : float
        What `fit` left for later queries (on disk, or where it would be), in bytes per chunk; 0 where a query
        needs only the corpus itself.
    """

    name: str
    bytes_per_chunk: float

    def fit(self, task: Task) -> None:
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


def score_all(method: Method, queries: QuerySet) -> np.ndarray:
    """All blocks of `Method.score` as one array, (Q, n) float32."""
    blocks = list(method.score(queries))
    return np.concatenate(blocks) if blocks else np.zeros((0, 0), np.float32)
