"""The model's own hidden states of chunks and queries, and how alike they are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from stride_cli.data.query_set import QUERY_BLOCK
from stride_cli.data.texts import require_text
from stride_cli.output import progress
from stride_cli.research.methods.vectors import VectorTable

if TYPE_CHECKING:
    from torch import Tensor

    from stride_cli.data.batches import Batch
    from stride_cli.data.query_set import QuerySet
    from stride_cli.data.workspace import Workspace
    from stride_cli.models.protocol import AttributableModel

_TOKENS = 8192  # padded, of one forward pass


class AlikeStates:
    """How alike the states are from which the model predicts a chunk's scored tokens and a query's.

        score_i = max(0, cos(h_i, h_x))^8

    h is the mean, over the positions that predict a scored token, of what the output head reads. Two texts
    that share no word have states alike where the model is about to say the same.
    """

    name = "states"

    def fit(self, workspace: Workspace) -> None:
        """One forward pass over the corpus.

        Raises
        ------
        UsageError      the workspace is not one of language
        """
        require_text(workspace, self.name)
        self._model = workspace.model
        self._table = VectorTable(workspace.n_chunks, workspace.model.d_model)
        with progress("reading the states of chunks", workspace.n_chunks, unit="chunks") as bar:
            for batch in workspace.chunks.batches(_TOKENS):
                self._table.put(batch.rows, self._states(batch))
                bar.advance(len(batch.rows))

    def score(self, queries: QuerySet) -> Iterator[np.ndarray]:
        """(q, n) float32, 0 … 1, of at most `QUERY_BLOCK` queries at once."""
        for start in range(0, len(queries), QUERY_BLOCK):
            rows = np.arange(start, min(start + QUERY_BLOCK, len(queries)))
            groups = [self._states(queries.batch(group)) for group in queries.groups(_TOKENS, rows)]
            cosines = self._table.products(np.concatenate(groups))
            yield np.maximum(cosines, 0.0) ** 8

    def _states(self, batch: Batch) -> np.ndarray:
        lengths = np.full(len(batch.ids), batch.ids.shape[1])  # padding is not scored
        states = pooled_states(self._model, batch, lengths, layer=None, pool="scored")
        return np.asarray(states.cpu().numpy())


def pooled_states(
    model: AttributableModel, batch: Batch, lengths: np.ndarray, *, layer: int | None, pool: str
) -> Tensor:
    """One vector for each sequence of a batch.

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
