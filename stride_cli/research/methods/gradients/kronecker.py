"""Kronecker factors of the curvature of linear layers: covariances of inputs and of output gradients, and the
eigenvalues in their basis (George et al. 2018, arXiv:1806.03884)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from stride_cli.errors import UsageError
from stride_cli.research.methods.gradients.capture import Capture, Factors
from stride_cli.research.methods.gradients.passes import Passes

if TYPE_CHECKING:
    from stride_cli.data.workspace import Workspace

_LARGEST_SIDE = 16384  # an eigendecomposition of this size takes 2 GiB


@dataclass(frozen=True)
class Curvature:
    """The Gauss–Newton matrix of one layer, U diag(values) Uᵀ with U = U_out ⊗ U_in.

    Attributes
    ----------
    basis_in : (n_in, n_in) float32       columns are eigenvectors
    basis_out : (n_out, n_out) float32
    values : (n_out, n_in) float32        mean squares of the gradients in this basis
    """

    basis_in: Tensor
    basis_out: Tensor
    values: Tensor

    def scaled(self, matrices: Tensor, factors: Tensor) -> Tensor:
        """U diag(factors) Uᵀ of (…, n_out, n_in), factors (n_out, n_in): a function of the eigenvalues."""
        turned = (self.basis_out.T @ (matrices @ self.basis_in)) * factors
        return self.basis_out @ (turned @ self.basis_in.T)


def corrected_curvature(
    models: Sequence[Callable[[], Passes]], workspace: Workspace, title: str, *, labels: str, draws: int
) -> list[Curvature]:
    """Fit the curvature of every layer, averaged over checkpoints of one model: the basis is that of the mean
    covariances, the eigenvalues are means in it.

    Parameters
    ----------
    models : sequence of callables     open a checkpoint each, so that one is held at a time
    labels : "true" | "sampled"
    draws : int                        sets of labels, where they are sampled

    Raises
    ------
    UsageError      a layer whose covariance is too large
    """
    draws = draws if labels == "sampled" else 1
    sums: list[tuple[Tensor, Tensor]] = []
    for open_model in models:
        passes = open_model()
        _check_sides(passes.capture)
        found = covariances(passes, workspace, f"{title}: covariances", labels=labels, draws=draws)
        sums = [(a + b, s + t) for (a, s), (b, t) in zip(sums, found, strict=True)] if sums else found
    device = workspace.model.device
    bases = [
        (torch.linalg.eigh(a)[1].float().to(device), torch.linalg.eigh(s)[1].float().to(device))
        for a, s in sums
    ]
    values: list[Tensor] = []
    for open_model in models:
        own = _eigenvalues(open_model(), bases, workspace, title, labels=labels, draws=draws)
        values = [a + b for a, b in zip(values, own, strict=True)] if values else own
    return [Curvature(*basis, value / len(models)) for basis, value in zip(bases, values, strict=True)]


def _check_sides(capture: Capture) -> None:
    for layer in capture.layers:
        if max(layer.n_in, layer.n_out) > _LARGEST_SIDE:
            raise UsageError(
                f"EK-FAC of layer '{layer.name}' ({layer.n_out} × {layer.n_in}) needs eigenvectors of "
                f"a matrix of more than {_LARGEST_SIDE} rows",
                fix="leave the output head out: layers=body, or layers=mlp",
            )


def _eigenvalues(
    passes: Passes,
    bases: Sequence[tuple[Tensor, Tensor]],
    workspace: Workspace,
    title: str,
    *,
    labels: str,
    draws: int,
) -> list[Tensor]:
    """Average (U_Sᵀ G U_A)² of every layer over chunks, (n_out, n_in) float32."""
    sums = [
        torch.zeros(layer.n_out, layer.n_in, device=workspace.model.device) for layer in passes.capture.layers
    ]

    def visit(found: Factors) -> None:
        basis_in, basis_out = bases[found.layer]
        turned = Factors(
            found.layer, found.rows, found.inputs @ basis_in, found.outputs @ basis_out, found.active
        )
        for block in turned.blocks():
            sums[found.layer] += block.gradients().square_().sum(dim=0)

    for draw in range(draws):
        # other labels than those that made the basis, which would look too steep along it
        number = draws + draw
        for _ in passes.corpus(workspace.chunks, visit, f"{title}: eigenvalues", labels=labels, draw=number):
            pass
    return [total / (draws * workspace.n_chunks) for total in sums]


def covariances(
    passes: Passes,
    workspace: Workspace,
    title: str,
    *,
    labels: str,
    draws: int = 1,
    rows: np.ndarray | None = None,
) -> list[tuple[Tensor, Tensor]]:
    """Average A = E[a aᵀ] and S = E[δ δᵀ] of every layer over tokens that a scored prediction reads.

    Parameters
    ----------
    labels : "true" | "sampled"
    draws : int                    sets of labels
    rows : (m,) int64, optional    these chunks only

    Returns
    -------
    list of (A (n_in, n_in), S (n_out, n_out)), float64
    """
    sums: list[tuple[Tensor, Tensor]] = []
    counts = [0.0] * len(passes.capture.layers)
    device = workspace.model.device
    # Metal devices have no float64; sums of covariances stay on the CPU there
    place = device if device.type != "mps" else torch.device("cpu")
    for layer in passes.capture.layers:
        sums.append(
            (
                torch.zeros(layer.n_in, layer.n_in, dtype=torch.float64, device=place),
                torch.zeros(layer.n_out, layer.n_out, dtype=torch.float64, device=place),
            )
        )

    def visit(found: Factors) -> None:
        inputs, outputs = found.inputs[found.active], found.outputs[found.active]  # (tokens, ·)
        a, s = sums[found.layer]
        a += (inputs.T @ inputs).to(a)
        s += (outputs.T @ outputs).to(s)
        counts[found.layer] += len(inputs)

    for draw in range(draws if labels == "sampled" else 1):
        for _ in passes.corpus(workspace.chunks, visit, title, labels=labels, draw=draw, rows=rows):
            pass
    return [(a / max(1.0, count), s / max(1.0, count)) for (a, s), count in zip(sums, counts, strict=True)]
