"""EK-FAC influence functions (Grosse et al. 2023, arXiv:2308.03296; George et al. 2018, arXiv:1806.03884).

Written here: kronfluence replaces the model's modules and knows no Conv1D. A test compares the scores.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from stride_cli.research.methods.gradients.graddot import Preconditioned, preconditioned_scores
from stride_cli.research.methods.gradients.kronecker import corrected_curvature
from stride_cli.research.methods.gradients.passes import (
    LABELS,
    REDUCTIONS,
    Passes,
    check_choice,
    check_positive,
    find_checkpoints,
    open_capture,
)

if TYPE_CHECKING:
    from stride_cli.data.query_set import QuerySet
    from stride_cli.data.workspace import Workspace


class EKFAC:
    """g_qᵀ (F + γ I)⁻¹ g_i summed over layers, F the Gauss–Newton matrix in a Kronecker-factored eigenbasis.

    The basis is that of S ⊗ A, the covariances of output gradients and inputs; the eigenvalues are the mean
    squares of the gradients in this basis, from labels drawn anew. The inverse is applied to the gradients of
    queries, whose products with those of the corpus are then exact. Of several checkpoints, each has its own
    gradients and curvature, and the influences are summed.

    Parameters
    ----------
    damping : float          γ as a multiple of the mean eigenvalue of F, layer by layer
    labels : "sampled" | "true"
        Drawn from the model, ``draws`` times, or those of the corpus (the empirical Fisher matrix).
    checkpoints, rates : str, optional      as for `find_checkpoints`; default: the task's model
    layers : str, optional   as for `Capture`; default "mlp" for language (as in the publication), "all" for
                             classifiers
    reduction : str          as for `Passes`
    batch_tokens : int       padded tokens of one pass
    query_bytes : int, optional      most memory for the gradients of queries; default: 1/8 of what is free

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
        checkpoints: str | None = None,
        rates: str | None = None,
        layers: str | None = None,
        reduction: str = "sum",
        batch_tokens: int = 2048,
        query_bytes: int | None = None,
    ) -> None:
        check_positive(self.name, draws=draws, batch_tokens=batch_tokens, query_bytes=query_bytes)
        self.labels = check_choice(self.name, "labels", labels, LABELS)
        self.reduction = check_choice(self.name, "reduction", reduction, REDUCTIONS)
        self.checkpoints = find_checkpoints(checkpoints, rates)
        self.damping, self.draws, self.layers = damping, draws, layers
        self.batch_tokens, self.query_bytes = batch_tokens, query_bytes

    def fit(self, workspace: Workspace) -> None:
        self._task = workspace
        self._opened: Passes | None = None  # kept where there is one model only
        self._curvatures = [
            corrected_curvature(
                [partial(self._open, number)], workspace, "EK-FAC", labels=self.labels, draws=self.draws
            )
            for number in range(len(self.checkpoints))
        ]
        self._inverses = [
            [_damped_inverse(layer.values, self.damping) for layer in layers] for layers in self._curvatures
        ]

    def score(self, queries: QuerySet) -> Iterator[np.ndarray]:
        yield from preconditioned_scores(
            [partial(self._preconditioned, number) for number in range(len(self.checkpoints))],
            self._task,
            queries,
            query_bytes=self.query_bytes,
            title="EK-FAC: products",
        )

    def _open(self, number: int) -> Passes:
        if self._opened is not None:
            return self._opened
        workspace = self._task
        capture = open_capture(workspace, self.layers, self.checkpoints[number].load(workspace))
        passes = Passes(capture, self.batch_tokens, self.reduction, workspace.seed)
        self._opened = passes if len(self.checkpoints) == 1 else None
        return passes

    def _preconditioned(self, number: int) -> Preconditioned:
        curvature, inverses = self._curvatures[number], self._inverses[number]
        return Preconditioned(
            self._open(number),
            lambda layer, matrices: curvature[layer].scaled(matrices, inverses[layer]),
            self.checkpoints[number].rate,
        )


def _damped_inverse(values: Tensor, damping: float) -> Tensor:
    shifted = values + damping * values.mean()
    floor = values.max() * max(values.shape) * torch.finfo(torch.float32).eps
    return torch.where(shifted > floor, 1 / shifted, 0.0)
