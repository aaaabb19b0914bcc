"""LoGRA: influence in low-rank projections of the gradients of each layer (Choe et al. 2024,
arXiv:2405.13954).

Written here: the authors' package (logix) does not install on current Python, and the others have no
two-sided projection with a damped inverse.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from stride_cli.randomness import stream
from stride_cli.research.methods.gradients.features import (
    Solver,
    corpus_features,
    products,
    query_features,
    sampled_moments,
)
from stride_cli.research.methods.gradients.kronecker import covariances
from stride_cli.research.methods.gradients.passes import (
    LABELS,
    REDUCTIONS,
    Passes,
    check_choice,
    check_positive,
    open_capture,
)
from stride_cli.research.methods.gradients.projection import TwoSided, principal_sides, random_sides

if TYPE_CHECKING:
    from stride_cli.data.query_set import QuerySet
    from stride_cli.data.workspace import Workspace

INITS = ("random", "pca")
_PCA_CHUNKS = 1024


class LoGRA:
    """g_qᵀ (H + γ I)⁻¹ g_i summed over layers, with g = P_out G P_inᵀ and H the second moment of the g_i.

    Defaults are those of the paper's pre-training runs (app:baseline_details): rank 8, MLP modules, random
    projections, raw Hessian.

    Parameters
    ----------
    rank : int               of both sides of a projection
    init : "random" | "pca"
        Random subspaces, or the leading eigenvectors of the covariances of inputs and output gradients on at
        most 1,024 chunks.
    damping : float          γ as a multiple of the mean eigenvalue of H, layer by layer
    labels : "true" | "sampled"
        H of the stored gradients ("raw Hessian"), or of gradients with labels drawn from the model, ``draws``
        times: the projected Gauss–Newton matrix.
    layers : str, optional   as for `Capture`; default "mlp" for language, "all" for classifiers
    reduction : str          as for `Passes`
    batch_tokens : int       padded tokens of one pass

    Raises
    ------
    UsageError      an option out of range
    """

    name = "logra"

    def __init__(
        self,
        *,
        rank: int = 8,
        init: str = "random",
        damping: float = 0.1,
        labels: str = "true",
        draws: int = 1,
        layers: str | None = None,
        reduction: str = "sum",
        batch_tokens: int = 2048,
    ) -> None:
        check_positive(self.name, rank=rank, draws=draws, batch_tokens=batch_tokens)
        self.init = check_choice(self.name, "init", init, INITS)
        self.labels = check_choice(self.name, "labels", labels, LABELS)
        self.reduction = check_choice(self.name, "reduction", reduction, REDUCTIONS)
        self.rank, self.damping, self.draws = rank, damping, draws
        self.layers, self.batch_tokens = layers, batch_tokens
        self.bytes_per_chunk = 0.0

    def fit(self, workspace: Workspace) -> None:
        capture = open_capture(workspace, self.layers)
        self._passes = passes = Passes(capture, self.batch_tokens, self.reduction, workspace.seed)
        if self.init == "pca":
            random = stream(workspace.seed, "logra sample")
            size = min(_PCA_CHUNKS, workspace.n_chunks)
            rows = np.sort(random.choice(workspace.n_chunks, size, replace=False))
            found = covariances(passes, workspace, "LoGRA: principal directions", labels="true", rows=rows)
            sides = principal_sides(found, self.rank)
        else:
            sides = random_sides(
                capture.layers, self.rank, workspace.seed, "logra projection", 0, workspace.model.device
            )
        self._projector = projector = TwoSided(sides)
        self._features, _ = corpus_features(passes, workspace, projector, "LoGRA: gradients")
        if self.labels == "true":
            self._solvers = [
                Solver.of_rows(self._features[:, span], self.damping) for span in projector.spans
            ]
        else:
            moments = sampled_moments(passes, workspace, projector, "LoGRA: curvature", self.draws)
            self._solvers = [Solver.of_moment(moment, self.damping) for moment in moments]
        self.bytes_per_chunk = float(projector.width * self._features.itemsize)

    def score(self, queries: QuerySet) -> Iterator[np.ndarray]:
        for block in query_features(self._passes, queries, self._projector):
            solved = np.empty_like(block)
            for span, solver in zip(self._projector.spans, self._solvers, strict=True):
                solved[:, span] = solver(block[:, span])
            yield products(solved, self._features)
