"""Kronecker factors of the curvature of linear layers: covariances of inputs and of output gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from stride_cli.methods.gradients.capture import Factors
from stride_cli.methods.gradients.passes import Passes

if TYPE_CHECKING:
    from stride_cli.data.workspace import Workspace


def covariances(
    passes: Passes,
    workspace: Workspace,
    title: str,
    *,
    labels: str,
    draws: int = 1,
    rows: np.ndarray | None = None,
) -> list[tuple[Tensor, Tensor]]:
    """A = E[a aᵀ] and S = E[δ δᵀ] of every layer, over tokens that a scored prediction reads.

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
