"""Influence of the output layer alone, with its exact curvature (Koh and Liang 2017, arXiv:1703.04730).

Written here: no library has the closed form of a softmax layer's Gauss–Newton matrix; it needs no sampled
labels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from stride_cli.errors import ModelError
from stride_cli.output import progress
from stride_cli.research.methods.gradients.capture import Capture
from stride_cli.research.methods.gradients.graddot import Preconditioned, preconditioned_scores
from stride_cli.research.methods.gradients.passes import REDUCTIONS, Passes, check_choice, check_positive

if TYPE_CHECKING:
    from stride_cli.data.batches import Batch
    from stride_cli.data.query_set import QuerySet
    from stride_cli.data.workspace import Workspace

CURVATURES = ("auto", "exact", "kronecker")
_EXACT = 4096  # parameters; the matrix of so many takes 134 MB
_FULL_LABELS = 4096  # labels; above, S is its diagonal
_TOKEN_FLOATS = 1 << 25  # logits of the tokens taken at once


class LastLayerInfluence:
    """g_qᵀ (H + γ I)⁻¹ g_i with g = Σ_t (p − onehot) ⊗ h and H the mean over chunks of Σ_t (diag p − p pᵀ) ⊗
    h hᵀ, both in the weights (and bias) of the output layer.

    Parameters
    ----------
    curvature : "exact" | "kronecker" | "auto"
        H itself, or E[diag p − p pᵀ] ⊗ E[h hᵀ] (above 4,096 labels with the diagonal of the first factor);
        "auto" is exact up to 4,096 parameters.
    damping : float          γ as a multiple of the mean eigenvalue of H
    reduction : str          as for `Passes`
    batch_tokens : int       padded tokens of one pass
    query_bytes : int, optional      most memory for the gradients of queries; default: 1/8 of what is free

    Raises
    ------
    UsageError      an option out of range
    ModelError      the logits are made by something else than one linear layer
    """

    name = "lastlayer"
    bytes_per_chunk = 0.0
    shares_a_pass = True

    def __init__(
        self,
        *,
        curvature: str = "auto",
        damping: float = 0.1,
        reduction: str = "sum",
        batch_tokens: int = 2048,
        query_bytes: int | None = None,
    ) -> None:
        check_positive(self.name, batch_tokens=batch_tokens, query_bytes=query_bytes)
        self.curvature = check_choice(self.name, "curvature", curvature, CURVATURES)
        self.reduction = check_choice(self.name, "reduction", reduction, REDUCTIONS)
        self.damping, self.batch_tokens, self.query_bytes = damping, batch_tokens, query_bytes

    def fit(self, workspace: Workspace) -> None:
        self._task = workspace
        capture = Capture(workspace.model, workspace.chunks.batch(np.arange(1)), layers="head")
        if len(capture.layers) != 1:
            raise ModelError(
                f"the logits are made by {len(capture.layers)} linear layers, expected one",
                fix="choose another method: ekfac, logra",
            )
        self._passes = Passes(capture, self.batch_tokens, self.reduction, workspace.seed)
        exact = self.curvature == "exact" or (self.curvature == "auto" and capture.layers[0].size <= _EXACT)
        kind = _Exact if exact else _Kronecker
        self._curvature = kind(capture.layers[0].n_in, capture.layers[0].n_out, workspace.model.device)
        with progress("last layer: curvature", workspace.n_chunks, unit="chunks") as ticker:
            for batch in workspace.chunks.batches(self.batch_tokens):
                for states, probability, slope, weight in self._tokens(batch):
                    self._curvature.add(states, probability, slope, weight)
                ticker.advance(len(batch.rows))
        self._curvature.finish(workspace.n_chunks, self.damping)

    def score(self, queries: QuerySet) -> Iterator[np.ndarray]:
        whole = Preconditioned(self._passes, lambda _, matrices: self._curvature.solve(matrices))
        title = "last layer: products"
        yield from preconditioned_scores(
            [lambda: whole], self._task, queries, query_bytes=self.query_bytes, title=title
        )

    def _tokens(self, batch: Batch) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Yield, for the positions that predict scored tokens, h (N, d) with a 1 for the bias, p (N, C), the
        slope of the logits in the layer's output (N, C), 1 but for soft caps, and the loss weight (N,).
        """
        model, layer = self._task.model, self._passes.capture.layers[0]
        weights = batch.weights[:, 1:].to(model.device)
        share = (
            weights if self.reduction == "sum" else weights / batch.scored.to(weights).clamp_min(1)[:, None]
        )
        with torch.no_grad():
            final = model.continue_from(model.hidden(batch.ids.to(model.device), 0), 0)[:, :-1]
        chosen = weights > 0
        states, share = final[chosen], share[chosen]
        at_once = max(1, _TOKEN_FLOATS // layer.n_out)
        for start in range(0, len(states), at_once):
            part = states[start : start + at_once].detach()
            written: list[Tensor] = []

            def note(module: object, args: object, output: Tensor, written: list[Tensor] = written) -> Tensor:
                written.append(output.detach().requires_grad_(True))
                return written[0]

            handle = layer.module.register_forward_hook(note)
            try:
                with torch.enable_grad():
                    logits = model.logits(part)
            finally:
                handle.remove()
            if logits is written[0]:
                slope = torch.ones_like(logits)
            else:  # scaled or soft-capped, label by label
                (slope,) = torch.autograd.grad(logits.sum(), written[0])
            read = part.float()
            if layer.n_in > read.shape[1]:
                read = torch.cat([read, torch.ones_like(read[:, :1])], dim=1)
            probability = logits.detach().float().softmax(-1)
            yield read, probability, slope.detach().float(), share[start : start + at_once]


@dataclass
class _Exact:
    """H as a matrix, (C·d, C·d) float64."""

    n_in: int
    n_out: int
    device: torch.device

    def __post_init__(self) -> None:
        self._size = self.n_in * self.n_out
        self._sum = torch.zeros(self._size, self._size, dtype=torch.float64, device=self.device)

    def add(self, states: Tensor, probability: Tensor, slope: Tensor, weight: Tensor) -> None:
        spread = probability * slope
        flat = (spread * weight.sqrt()[:, None])[:, :, None] * states[:, None, :]  # (N, C, d)
        flat = flat.flatten(1)
        self._sum -= (flat.T @ flat).double()
        own = self._sum.view(self.n_out, self.n_in, self.n_out, self.n_in)
        for label in range(self.n_out):
            each = weight * spread[:, label] * slope[:, label]
            own[label, :, label, :] += ((states * each[:, None]).T @ states).double()

    def finish(self, n_chunks: int, damping: float) -> None:
        matrix = self._sum / n_chunks
        values, self._vectors = torch.linalg.eigh(matrix)
        values = values.clamp_min(0)
        self._values = values + damping * values.mean()
        # without damping: the pseudo-inverse (adding a constant to all logits changes nothing)
        floor = values.max() * len(values) * torch.finfo(torch.float32).eps
        self._values[self._values <= floor] = float("inf")

    def solve(self, matrices: Tensor) -> Tensor:
        flat = matrices.flatten(1).double() @ self._vectors
        return ((flat / self._values) @ self._vectors.T).float().view_as(matrices)


@dataclass
class _Kronecker:
    """H as S ⊗ A, in the eigenbases of both; S by its diagonal where there are many labels."""

    n_in: int
    n_out: int
    device: torch.device

    def __post_init__(self) -> None:
        double = {"dtype": torch.float64, "device": self.device}
        self._full = self.n_out <= _FULL_LABELS
        self._inputs = torch.zeros(self.n_in, self.n_in, **double)  # type: ignore[call-overload]
        self._labels = torch.zeros(self.n_out, **double)  # type: ignore[call-overload]
        self._pairs = torch.zeros(self.n_out, self.n_out if self._full else 0, **double)  # type: ignore[call-overload]
        self._weight = 0.0

    def add(self, states: Tensor, probability: Tensor, slope: Tensor, weight: Tensor) -> None:
        spread = probability * slope
        self._inputs += ((states * weight[:, None]).T @ states).double()
        if self._full:
            self._labels += (weight @ (spread * slope)).double()
            self._pairs += ((spread * weight[:, None]).T @ spread).double()
        else:
            self._labels += (weight @ (spread * slope - spread.square())).double()
        self._weight += float(weight.sum())

    def finish(self, n_chunks: int, damping: float) -> None:
        inputs = self._inputs / max(self._weight, 1e-12)
        self._values_in, basis = torch.linalg.eigh(inputs)
        self._basis_in = basis.float()
        if self._full:
            labels = (torch.diag(self._labels) - self._pairs) / max(self._weight, 1e-12)
            self._values_out, basis = torch.linalg.eigh(labels)
            self._basis_out = basis.float()
        else:
            self._values_out = self._labels / max(self._weight, 1e-12)
        scale = self._weight / n_chunks
        values = self._values_out.clamp_min(0)[:, None] * self._values_in.clamp_min(0) * scale  # (C, d)
        floor = values.max() * max(values.shape) * torch.finfo(torch.float32).eps
        values = values + damping * values.mean()
        values[values <= floor] = float("inf")
        self._inverse = (1 / values).float()
        del self._inputs, self._pairs

    def solve(self, matrices: Tensor) -> Tensor:
        turned = matrices @ self._basis_in
        if not self._full:
            return (turned * self._inverse) @ self._basis_in.T
        turned = torch.einsum("oc,qod->qcd", self._basis_out, turned) * self._inverse
        return torch.einsum("oc,qcd->qod", self._basis_out, turned) @ self._basis_in.T
