"""Cosine of the model's own hidden states: RDS and FeatSim (Hanawa et al. 2021)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from stride_cli.errors import UsageError
from stride_cli.research.methods.protocol import query_blocks
from stride_cli.research.methods.vectors import VectorTable

if TYPE_CHECKING:
    from torch import Tensor

    from stride_cli.data.batches import Batch
    from stride_cli.data.query_set import QuerySet
    from stride_cli.data.workspace import Workspace
    from stride_cli.models.protocol import AttributableModel

POOLS = ("mean", "last", "scored")


class RDS:
    """Cosine of pooled hidden states (app:baseline_details: final layer, mean over tokens).

    A classifier's example has one state, the features its label is read from: there RDS is FeatSim.

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
        self.layer, self.pool, self.batch_tokens = layer, pool, batch_tokens

    def fit(self, workspace: Workspace) -> None:
        self._model = model = workspace.model
        if self.layer is not None and not 0 <= self.layer <= model.n_layers:
            raise UsageError(
                f"{self.name}: layer should be between 0 and the model's {model.n_layers}, "
                f"found {self.layer}",
                fix="leave layer out for the last",
            )
        self._pool = self.pool if self.pool in model.pools else model.pools[0]
        chunks = workspace.chunks
        self._table = VectorTable(workspace.n_chunks, model.d_model)
        for batch in chunks.batches(self.batch_tokens):
            self._table.put(batch.rows, self._states(batch, chunks.lengths[batch.rows]))
        self.bytes_per_chunk = self._table.bytes_per_chunk if workspace.n_chunks else 0.0

    def score(self, queries: QuerySet) -> Iterator[np.ndarray]:
        for rows in query_blocks(queries):
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
    over the positions that predict a scored token: unlike in RDS, a prompt counts only as context.
    """

    name = "featsim"

    def __init__(self, *, batch_tokens: int = 8192) -> None:
        super().__init__(pool="scored", batch_tokens=batch_tokens)


def pooled_states(
    model: AttributableModel, batch: Batch, lengths: np.ndarray, *, layer: int | None, pool: str
) -> Tensor:
    """Pool the hidden states of every sequence of a batch to one vector.

    Parameters
    ----------
    lengths : (B,) int        tokens of each sequence, without padding
    layer : int, optional     residual stream after that many blocks; None: after the last and the final norm
    pool : str                "mean", "last" or "scored"

    Returns
    -------
    Tensor (B, d_model) float32      zeros where nothing is pooled (a chunk without a scored token)
    """
    import torch

    with torch.no_grad():
        ids = batch.ids.to(model.device)
        states = model.hidden(ids, model.n_layers if layer is None else layer)
        if layer is None:
            states = model.continue_from(states, model.n_layers)  # only the final norm is left
        positions = torch.arange(ids.shape[1])
        ends = torch.as_tensor(lengths)[:, None]
        if pool == "mean":
            share = (positions < ends).float()  # (B, T)
        elif pool == "last":
            share = (positions == ends - 1).float()
        else:  # the state at position t predicts token t + 1
            share = torch.nn.functional.pad(batch.weights[:, 1:], (0, 1))
        share = share / share.sum(1, keepdim=True).clamp_min(1e-9)
        return torch.einsum("bt,btd->bd", share.to(states.device), states.float())
