"""Tail-patch lift (app:metrics): one training step on the attributed chunks, against one on random chunks.

A lift above zero is good: the attributed chunks raise log p more. (The paper reports lifts below zero as
good, against its own formula.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from stride_cli.data.batches import row_losses
from stride_cli.errors import NumericalError, UsageError
from stride_cli.research.evaluation.options import TailPatchOptions
from stride_cli.research.evaluation.ranking import random_chunks
from stride_cli.research.evaluation.resampling import mean_records

if TYPE_CHECKING:
    import torch

    from stride_cli.data.query_set import QuerySet
    from stride_cli.data.workspace import Workspace
    from stride_cli.research.evaluation.records import TailPatchRecord

_BATCH_TOKENS = 4096
_QUERY_TOKENS = 4096  # padded, of queries at once


@dataclass(frozen=True)
class TailPatch:
    """Changes of log p by one step on k chunks, in nats per scored token.

    Attributes
    ----------
    k : int
    attributed : (Q,) float64      Δ log p of each query after a step on its own top k
    random : (Q,) float64          after a step on k random chunks, mean over draws
    """

    k: int
    attributed: np.ndarray
    random: np.ndarray

    @property
    def lift(self) -> np.ndarray:
        """Lift of each query, (Q,) float64; > 0: the attributed chunks help more."""
        return self.attributed - self.random

    def to_record(self, method: str, options: TailPatchOptions, *, seed: int) -> TailPatchRecord:
        """Make ``stride.tail_patch/1``."""
        values = {"lift": self.lift, "attributed": self.attributed, "random": self.random}
        return {
            "schema": "stride.tail_patch/1",
            "method": method,
            "k": self.k,
            **mean_records(values, seed=seed, name="tail-patch queries"),  # type: ignore[typeddict-item]
            "helped": float((self.lift > 0).mean()),
            "queries": len(self.lift),
            "draws": options.draws,
            "lr": options.lr,
        }


class Patcher:
    """Takes single gradient steps from the final model, and takes them back.

    Parameters
    ----------
    workspace : Workspace            the model in float32: a step of 1e-4 is lost in bf16
    queries : QuerySet     whose log p is looked at
    lr : float             η of θ' = θ − η ∇L(A_k; θ), L in mean nats per scored token of the batch

    Raises
    ------
    UsageError      the model is not float32
    """

    def __init__(self, workspace: Workspace, queries: QuerySet, *, lr: float = TailPatchOptions.lr) -> None:
        import torch

        if workspace.model.dtype not in (torch.float32, torch.float64):
            raise UsageError(
                f"the model is in {workspace.model.dtype}, and a step of {lr:g} would be rounded away in it",
                fix="run with --dtype fp32",
            )
        self.workspace, self._queries, self._lr = workspace, queries, lr
        self._parameters: list[torch.nn.Parameter] = list(workspace.model.model.parameters())
        self.base = self._losses(range(len(queries)))  # (Q,)

    def change(self, chunks: np.ndarray, rows: Sequence[int]) -> np.ndarray:
        """Measure Δ log p of queries `rows` by one step on `chunks`; the model is restored.

        Returns
        -------
        (len(rows),) float64, nats per scored token

        Raises
        ------
        NumericalError      the step makes a loss that is not finite
        """
        import torch

        # kept, not undone by adding: θ − g + g is not θ
        before = [parameter.detach().clone() for parameter in self._parameters]
        gradients = self._gradient(chunks)
        try:
            with torch.no_grad():
                for parameter, gradient in zip(self._parameters, gradients, strict=True):
                    if gradient is not None:
                        parameter.sub_(gradient, alpha=self._lr)
            changed = self.base[np.asarray(rows)] - self._losses(rows)
        finally:
            with torch.no_grad():
                for parameter, value in zip(self._parameters, before, strict=True):
                    parameter.copy_(value)
        if not np.isfinite(changed).all():
            raise NumericalError("a loss after the step is not finite", fix="lower --lr")
        return changed

    def _gradient(self, chunks: np.ndarray) -> list[torch.Tensor | None]:
        """Take ∇ of the mean loss over all scored tokens of the chunks, one tensor a parameter."""
        batches = list(self.workspace.chunks.batches(_BATCH_TOKENS, np.sort(chunks)))
        total = float(sum(float(batch.scored.sum()) for batch in batches))
        if total == 0:  # no scored token, no loss: a step that leads nowhere
            return [None] * len(self._parameters)
        with _trainable(self._parameters):
            for batch in batches:
                losses = row_losses(self.workspace.model, batch)
                (losses.sum() / total).backward()
            gradients = [parameter.grad for parameter in self._parameters]
            for parameter in self._parameters:
                parameter.grad = None
        return gradients

    def _losses(self, rows: Sequence[int]) -> np.ndarray:
        """Measure mean nats per scored token of queries, (len(rows),) float64."""
        import torch

        rows = list(rows)
        found = []
        with torch.no_grad():
            for group in self._queries.groups(self.workspace.model, _QUERY_TOKENS, np.array(rows)):
                batch = self._queries.batch(group)
                losses = row_losses(self.workspace.model, batch).cpu().double() / batch.scored.double()
                found.append(losses.numpy())
        return np.concatenate(found) if found else np.zeros(0)


def measure_tail_patch(
    patcher: Patcher, tops: np.ndarray, ks: Sequence[int], *, draws: int = TailPatchOptions.draws
) -> Iterator[TailPatch]:
    """Lift of each k.

    Random chunks are drawn once for all queries: each draw is one step, whose effect every query shows.

    Parameters
    ----------
    tops : (Q, max k) int64      each query's chunks by descending score
    ks : sequence of int
    draws : int                  random batches of every k

    Yields
    ------
    TailPatch
    """
    workspace = patcher.workspace
    n_queries = len(tops)
    for k in ks:
        chosen = random_chunks(workspace.n_chunks, k, draws, seed=workspace.seed, name="tail-patch random")
        random = np.mean([patcher.change(rows, range(n_queries)) for rows in chosen], axis=0)
        attributed = [patcher.change(tops[query, :k], [query])[0] for query in range(n_queries)]
        yield TailPatch(k, np.array(attributed), random)


@contextmanager
def _trainable(parameters: Sequence[torch.nn.Parameter]) -> Iterator[None]:
    """Let all parameters take gradients; afterwards none does, as everywhere else."""
    try:
        for parameter in parameters:
            parameter.requires_grad_(True)
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(False)
            parameter.grad = None
