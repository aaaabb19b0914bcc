"""Cosine of the model's own hidden states: RDS and FeatSim (Hanawa et al. 2021)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from stride_cli.research.methods.protocol import query_blocks
from stride_cli.research.methods.vectors import VectorTable

if TYPE_CHECKING:
    from stride_cli.data.batches import Batch
    from stride_cli.data.query_set import QuerySet
    from stride_cli.data.workspace import Workspace

_BATCH_TOKENS = 8192  # padded, of one forward pass


class RDS:
    """Cosine of the final hidden states, averaged over tokens (app:baseline_details).

    A classifier's example has one state, the features its label is read from: there RDS is FeatSim.
    """

    name = "rds"
    bytes_per_chunk = 0.0
    _pool = "mean"

    def fit(self, workspace: Workspace) -> None:
        self._model = model = workspace.model
        self._averaged = self._pool if self._pool in model.pools else model.pools[0]
        chunks = workspace.chunks
        self._table = VectorTable(workspace.n_chunks, model.d_model)
        for batch in chunks.batches(_BATCH_TOKENS):
            self._table.put(batch.rows, self._states(batch, chunks.lengths[batch.rows]))
        self.bytes_per_chunk = self._table.bytes_per_chunk if workspace.n_chunks else 0.0

    def score(self, queries: QuerySet) -> Iterator[np.ndarray]:
        for rows in query_blocks(queries):
            parts = []
            for group in queries.groups(self._model, _BATCH_TOKENS, rows):
                lengths = np.array([len(queries.ids[row]) for row in group])
                parts.append(self._states(queries.batch(group), lengths))
            yield self._table.products(np.concatenate(parts))

    def _states(self, batch: Batch, lengths: np.ndarray) -> np.ndarray:
        """Average the final hidden states of every sequence, (B, d_model) float32; zeros where no token
        counts."""
        import torch

        model = self._model
        with torch.no_grad():
            states = model.hidden(batch.ids.to(model.device), model.n_layers)
            states = model.continue_from(states, model.n_layers)  # only the final norm is left
            if self._averaged == "mean":
                ends = torch.as_tensor(lengths)[:, None]
                share = (torch.arange(batch.ids.shape[1]) < ends).float()  # (B, T)
            else:  # the state at position t predicts token t + 1
                share = torch.nn.functional.pad(batch.weights[:, 1:], (0, 1))
            share = share / share.sum(1, keepdim=True).clamp_min(1e-9)
            pooled = torch.einsum("bt,btd->bd", share.to(states.device), states.float())
        return pooled.cpu().numpy()


class FeatSim(RDS):
    """Cosine of the features that predictions are read from (app:baseline_details).

    For a classifier its penultimate activations; for a language model what the output head reads, averaged
    over the positions that predict a scored token: unlike in RDS, a prompt counts only as context.
    """

    name = "featsim"
    _pool = "scored"
