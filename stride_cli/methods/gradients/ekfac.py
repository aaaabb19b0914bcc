"""EK-FAC influence functions (Grosse et al. 2023, arXiv:2308.03296; George et al. 2018, arXiv:1806.03884).

Written here: kronfluence replaces the model's modules, knows no Conv1D and keeps its factors in files of its
own; a test compares the scores.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from stride_cli.errors import UsageError
from stride_cli.methods.gradients.capture import Factors
from stride_cli.methods.gradients.graddot import preconditioned_scores
from stride_cli.methods.gradients.kronecker import covariances
from stride_cli.methods.gradients.passes import (
    LABELS,
    REDUCTIONS,
    Passes,
    check_choice,
    check_positive,
    open_capture,
)

if TYPE_CHECKING:
    from stride_cli.data.query_set import QuerySet
    from stride_cli.data.workspace import Workspace

_LARGEST_SIDE = 16384  # an eigendecomposition of this size takes 2 GiB


class EKFAC:
    """g_qᵀ (F + γ I)⁻¹ g_i summed over layers, F the Gauss–Newton matrix in a Kronecker-factored eigenbasis.

    The basis is that of S ⊗ A, the covariances of output gradients and inputs; the eigenvalues are the mean
    squares of the gradients in this basis, from labels drawn anew. The inverse is applied to the gradients of
    queries, whose products with those of the corpus are then exact.

    Parameters
    ----------
    damping : float          γ as a multiple of the mean eigenvalue of F, layer by layer
    labels : "sampled" | "true"
        Drawn from the model, ``draws`` times, or those of the corpus (the empirical Fisher matrix).
    layers : str, optional   as for `Capture`; default "mlp" for language (as in the publication), "all" for
                             classifiers
    reduction : str          as for `Passes`
    batch_tokens : int       padded tokens of one pass
    query_bytes : int        most memory for the gradients of queries

    Raises
    ------
    UsageError      an option out of range; a layer whose covariance is too large
    """

    name = "ekfac"
    bytes_per_chunk = 0.0
    shares_a_pass = True

    def __init__(
        self,
        *,
        damping: float = 0.1,
        labels: str = "sampled",
        draws: int = 1,
        layers: str | None = None,
        reduction: str = "sum",
        batch_tokens: int = 2048,
        query_bytes: int = 1 << 30,
    ) -> None:
        check_positive(self.name, draws=draws, batch_tokens=batch_tokens, query_bytes=query_bytes)
        self.labels = check_choice(self.name, "labels", labels, LABELS)
        self.reduction = check_choice(self.name, "reduction", reduction, REDUCTIONS)
        self.damping, self.draws, self.layers = damping, draws, layers
        self.batch_tokens, self.query_bytes = batch_tokens, query_bytes

    def fit(self, workspace: Workspace) -> None:
        self._task = workspace
        capture = open_capture(workspace, self.layers)
        for layer in capture.layers:
            if max(layer.n_in, layer.n_out) > _LARGEST_SIDE:
                raise UsageError(
                    f"EK-FAC of layer '{layer.name}' ({layer.n_out} × {layer.n_in}) needs eigenvectors of "
                    f"a matrix of more than {_LARGEST_SIDE} rows",
                    fix="leave the output head out: layers=body, or layers=mlp",
                )
        self._passes = passes = Passes(capture, self.batch_tokens, self.reduction, workspace.seed)
        draws = self.draws if self.labels == "sampled" else 1
        found = covariances(passes, workspace, "EK-FAC: covariances", labels=self.labels, draws=draws)
        device = workspace.model.device
        self._bases = [
            (torch.linalg.eigh(a)[1].float().to(device), torch.linalg.eigh(s)[1].float().to(device))
            for a, s in found
        ]
        self._inverses = [
            _damped_inverse(values, self.damping) for values in self._eigenvalues(passes, workspace, draws)
        ]

    def score(self, queries: QuerySet) -> Iterator[np.ndarray]:
        yield from preconditioned_scores(
            self._passes,
            self._task,
            queries,
            self._solve,
            query_bytes=self.query_bytes,
            title="EK-FAC: products",
        )

    def _eigenvalues(self, passes: Passes, workspace: Workspace, draws: int) -> list[Tensor]:
        """Mean over chunks of (U_Sᵀ G U_A)² of every layer, (n_out, n_in) float32."""
        sums = [
            torch.zeros(layer.n_out, layer.n_in, device=workspace.model.device)
            for layer in passes.capture.layers
        ]

        def visit(found: Factors) -> None:
            basis_in, basis_out = self._bases[found.layer]
            turned = Factors(
                found.layer, found.rows, found.inputs @ basis_in, found.outputs @ basis_out, found.active
            )
            for block in turned.blocks():
                sums[found.layer] += block.gradients().square_().sum(dim=0)

        for draw in range(draws):
            # other labels than those that made the basis, which would look too steep along it
            number = draws + draw
            for _ in passes.corpus(
                workspace.chunks, visit, "EK-FAC: eigenvalues", labels=self.labels, draw=number
            ):
                pass
        return [total / (draws * workspace.n_chunks) for total in sums]

    def _solve(self, layer: int, matrices: Tensor) -> Tensor:
        basis_in, basis_out = self._bases[layer]
        turned = (basis_out.T @ (matrices @ basis_in)) * self._inverses[layer]
        return basis_out @ (turned @ basis_in.T)


def _damped_inverse(values: Tensor, damping: float) -> Tensor:
    shifted = values + damping * values.mean()
    floor = values.max() * max(values.shape) * torch.finfo(torch.float32).eps
    return torch.where(shifted > floor, 1 / shifted, 0.0)
