"""EK-FAC influence functions (Grosse et al. 2023, arXiv:2308.03296; George et al. 2018, arXiv:1806.03884).

Written here: kronfluence replaces the model's modules and knows no Conv1D. A test compares the scores.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from stride_cli.options import option
from stride_cli.research.methods.gradients.gauss_newton import (
    as_matrices,
    as_rows,
    conjugate_gradients,
    gauss_newton,
)
from stride_cli.research.methods.gradients.graddot import Preconditioned, preconditioned_scores
from stride_cli.research.methods.gradients.kronecker import corrected_curvature
from stride_cli.research.methods.gradients.passes import (
    LABELS,
    Passes,
    ProductOptions,
    find_checkpoints,
    open_capture,
)
from stride_cli.research.methods.protocol import takes

if TYPE_CHECKING:
    from stride_cli.data.query_set import QuerySet
    from stride_cli.data.workspace import Workspace

SOLVERS = ("factors", "cg")


@dataclass(frozen=True)
class EKFACOptions(ProductOptions):
    method = "ekfac"
    damping: float = option(0.1, "γ as a multiple of the mean eigenvalue of F, layer by layer.", low=0)
    labels: str = option("sampled", "Drawn from the model, or the corpus's own.", choices=LABELS)
    draws: int = option(1, "Sets of labels that are drawn.", low=1)
    checkpoints: str | None = option(None, "Models, separated by |; default: the index's.")
    rates: str | None = option(None, "A weight for each, separated by |; default: its learning rate.")
    solve: str = option("factors", "F in factors, or exact, by conjugate gradients.", choices=SOLVERS)
    steps: int = option(20, "Of the conjugate gradients: passes over the corpus.", low=1)


class EKFAC:
    """g_qᵀ (F + γ I)⁻¹ g_i summed over layers, F the Gauss–Newton matrix in a Kronecker-factored eigenbasis.

    The basis is that of S ⊗ A, the covariances of output gradients and inputs; the eigenvalues are the mean
    squares of the gradients in this basis, from labels drawn anew. The inverse is applied to the gradients of
    queries, whose products with those of the corpus are then exact. Of several checkpoints, each has its own
    gradients and curvature, and the influences are summed. Default layers: "mlp" for language, as in the
    publication, "all" for classifiers.

    Directions are left out where λ + γ is below the layer's largest eigenvalue times its longer side times
    float32's ε, a pseudo-inverse's rounding. Scores predict retrained models better so than with all of them.

    With `solve=cg` F is the exact Gauss–Newton matrix of all chosen layers together: conjugate gradients,
    which the factors precondition, as in ASTRA (Wang et al. 2025, arXiv:2507.14740). γ stays as it is, and
    the solution in the directions that are kept.

    Raises
    ------
    UsageError      an option out of range; a layer whose covariance is too large
    """

    name = "ekfac"
    bytes_per_chunk = 0.0
    shares_a_pass = True

    @takes(EKFACOptions)
    def __init__(self, **given: Any) -> None:
        self.options = EKFACOptions(**given)
        self.checkpoints = find_checkpoints(self.options.checkpoints, self.options.rates)

    def fit(self, workspace: Workspace) -> None:
        self._task = workspace
        self._opened: Passes | None = None  # kept where there is one model only
        given: Any = {"labels": self.options.labels, "draws": self.options.draws}
        self._curvatures = [
            corrected_curvature([partial(self._open, number)], workspace, "EK-FAC", **given)
            for number in range(len(self.checkpoints))
        ]
        self._inverses = [
            [_damped_inverse(layer.values, self.options.damping) for layer in layers]
            for layers in self._curvatures
        ]

    def score(self, queries: QuerySet) -> Iterator[np.ndarray]:
        yield from preconditioned_scores(
            [partial(self._preconditioned, number) for number in range(len(self.checkpoints))],
            self._task,
            queries,
            query_bytes=self.options.query_bytes,
            title="EK-FAC: products",
        )

    def _open(self, number: int) -> Passes:
        if self._opened is not None:
            return self._opened
        workspace, options = self._task, self.options
        capture = open_capture(workspace, options.layers, self.checkpoints[number].load(workspace))
        passes = Passes.of(options, capture, workspace)
        self._opened = passes if len(self.checkpoints) == 1 else None
        return passes

    def _preconditioned(self, number: int) -> Preconditioned:
        curvature, inverses = self._curvatures[number], self._inverses[number]
        passes = self._open(number)

        def factored(matrices: dict[int, Tensor]) -> None:
            for layer, own in matrices.items():
                matrices[layer] = curvature[layer].scaled(own, inverses[layer])

        def solved(matrices: dict[int, Tensor]) -> None:
            layers, chunks = passes.capture.layers, self._task.chunks
            means = [
                each.values.mean().expand(layer.size) for each, layer in zip(curvature, layers, strict=True)
            ]
            damping = self.options.damping * torch.cat(means)

            def precondition(rows: Tensor) -> Tensor:
                own = as_matrices(rows, layers)
                factored(own)
                return as_rows(own)

            def product(rows: Tensor) -> Tensor:
                return gauss_newton(passes, chunks, rows) + damping * rows

            found = conjugate_gradients(product, precondition, as_rows(matrices), self.options.steps)
            matrices.update(as_matrices(found, layers))

        apply = solved if self.options.solve == "cg" else factored
        return Preconditioned(passes, apply, self.checkpoints[number].rate)


def _damped_inverse(values: Tensor, damping: float) -> Tensor:
    shifted = values + damping * values.mean()
    floor = values.max() * max(values.shape) * torch.finfo(torch.float32).eps
    return torch.where(shifted > floor, 1 / shifted, 0.0)
