"""Cosine of the model's own hidden states: RDS and FeatSim (Hanawa et al. 2021)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from stride_cli.data.query_set import QUERY_BLOCK
from stride_cli.errors import UsageError
from stride_cli.research.methods.states import pooled_states
from stride_cli.research.methods.vectors import VectorTable

if TYPE_CHECKING:
    from stride_cli.data.batches import Batch
    from stride_cli.data.query_set import QuerySet
    from stride_cli.data.workspace import Workspace

POOLS = ("mean", "last", "scored")


class RDS:
    """Cosine of pooled hidden states (app:baseline_details: final layer, mean over tokens).

    A classifier's example has one state, the features its label is read from, so that there RDS is FeatSim.

    Parameters
    ----------
    layer : int, optional
        The states after that many blocks. Default: those after the last block and the final norm, which are
        transformers' last `hidden_states`.
    pool : str
        "mean" over all tokens, "last" token, or "scored": mean over the positions that predict a scored token
    batch_tokens : int      padded tokens of one forward pass

    Raises
    ------
    UsageError      an option out of range
    """

    name = "rds"
    bytes_per_chunk = 0.0

    def __init__(self, *, layer: int | None = None, pool: str = "mean", batch_tokens: int = 8192) -> None:
        if pool not in POOLS:
            raise UsageError(f"{self.name}: pool should be {' or '.join(POOLS)}, found '{pool}'")
        if batch_tokens < 1:
            raise UsageError(f"{self.name}: batch_tokens should be 1 or more, found {batch_tokens}")
        self.layer = layer
        self.pool = pool
        self.batch_tokens = batch_tokens

    def fit(self, workspace: Workspace) -> None:
        model = workspace.model
        if self.layer is not None and not 0 <= self.layer <= model.n_layers:
            raise UsageError(
                f"{self.name}: layer should be between 0 and the model's {model.n_layers}, "
                f"found {self.layer}",
                fix="leave layer out for the last",
            )
        self._model = model
        self._pool = self.pool if self.pool in model.pools else model.pools[0]
        chunks = workspace.chunks
        self._table: VectorTable | None = None
        for batch in chunks.batches(self.batch_tokens):
            states = self._states(batch, chunks.lengths[batch.rows])
            if self._table is None:
                self._table = VectorTable(workspace.n_chunks, states.shape[1])
            self._table.put(batch.rows, states)
        self._n_chunks = workspace.n_chunks
        self.bytes_per_chunk = 0.0 if self._table is None else self._table.bytes_per_chunk

    def score(self, queries: QuerySet) -> Iterator[np.ndarray]:
        for start in range(0, len(queries), QUERY_BLOCK):
            rows = np.arange(start, min(start + QUERY_BLOCK, len(queries)))
            if self._table is None:  # a corpus of no chunks
                yield np.zeros((len(rows), self._n_chunks), np.float32)
                continue
            parts = []
            for group in queries.groups(self.batch_tokens, rows):
                lengths = np.array([len(queries.ids[row]) for row in group])
                parts.append(self._states(queries.batch(group), lengths))
            yield self._table.products(np.concatenate(parts))

    def _states(self, batch: Batch, lengths: np.ndarray) -> np.ndarray:
        states = pooled_states(self._model, batch, lengths, layer=self.layer, pool=self._pool)
        return states.cpu().numpy()


class FeatSim(RDS):
    """Cosine of the features that predictions are read from (app:baseline_details).

    For a classifier its penultimate activations; for a language model what the output head reads, averaged
    over the positions that predict a scored token: unlike RDS, a prompt counts only as context.
    """

    name = "featsim"

    def __init__(self, *, batch_tokens: int = 8192) -> None:
        super().__init__(pool="scored", batch_tokens=batch_tokens)
