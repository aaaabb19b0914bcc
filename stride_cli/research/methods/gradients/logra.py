"""LoGRA: influence in low-rank projections of the gradients of each layer (Choe et al. 2024,
arXiv:2405.13954).

Written here: the authors' package (logix) does not install on current Python, and the others have no
two-sided projection with a damped inverse.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from stride_cli.options import option
from stride_cli.randomness import stream
from stride_cli.research.methods.gradients.features import (
    Solver,
    corpus_features,
    products,
    query_features,
    sampled_moments,
)
from stride_cli.research.methods.gradients.kronecker import covariances
from stride_cli.research.methods.gradients.passes import LABELS, Passes, SumOptions, open_capture
from stride_cli.research.methods.gradients.projection import TwoSided, principal_sides, random_sides
from stride_cli.research.methods.protocol import takes

if TYPE_CHECKING:
    from stride_cli.data.query_set import QuerySet
    from stride_cli.data.workspace import Workspace

INITS = ("random", "pca")
_PCA_CHUNKS = 1024


@dataclass(frozen=True)
class LoGRAOptions(SumOptions):
    method = "logra"
    rank: int = option(8, "Of both sides of a projection.", low=1)
    init: str = option(
        "random", "Random subspaces, or leading eigenvectors of covariances on 1,024 chunks.", choices=INITS
    )
    damping: float = option(0.1, "γ as a multiple of the mean eigenvalue of H, layer by layer.", low=0)
    labels: str = option(
        "true",
        "H of the stored gradients (raw Hessian), or with labels drawn from the model.",
        choices=LABELS,
    )
    draws: int = option(1, "Sets of labels that are drawn.", low=1)


class LoGRA:
    """g_qᵀ (H + γ I)⁻¹ g_i summed over layers, with g = P_out G P_inᵀ and H the second moment of the g_i.

    Defaults are those of the paper's pre-training runs (app:baseline_details): rank 8, MLP modules, random
    projections, raw Hessian. With drawn labels H is the projected Gauss–Newton matrix.

    Raises
    ------
    UsageError      an option out of range
    """

    name = "logra"

    @takes(LoGRAOptions)
    def __init__(self, **given: Any) -> None:
        self.options = LoGRAOptions(**given)
        self.bytes_per_chunk = 0.0

    def fit(self, workspace: Workspace) -> None:
        options = self.options
        capture = open_capture(workspace, options.layers)
        self._passes = passes = Passes.of(options, capture, workspace)
        if options.init == "pca":
            random = stream(workspace.seed, "logra sample")
            size = min(_PCA_CHUNKS, workspace.n_chunks)
            rows = np.sort(random.choice(workspace.n_chunks, size, replace=False))
            found = covariances(passes, workspace, "LoGRA: principal directions", labels="true", rows=rows)
            sides = principal_sides(found, options.rank)
        else:
            sides = random_sides(
                capture.layers, options.rank, workspace.seed, "logra projection", 0, workspace.model.device
            )
        self._projector = projector = TwoSided(sides)
        self._features, _ = corpus_features(passes, workspace, projector, "LoGRA: gradients")
        if options.labels == "true":
            self._solvers = [
                Solver.of_rows(self._features[:, span], options.damping) for span in projector.spans
            ]
        else:
            moments = sampled_moments(passes, workspace, projector, "LoGRA: curvature", options.draws)
            self._solvers = [Solver.of_moment(moment, options.damping) for moment in moments]
        self.bytes_per_chunk = float(projector.width * self._features.itemsize)

    def score(self, queries: QuerySet) -> Iterator[np.ndarray]:
        for block in query_features(self._passes, queries, self._projector):
            solved = np.empty_like(block)
            for span, solver in zip(self._projector.spans, self._solvers, strict=True):
                solved[:, span] = solver(block[:, span])
            yield products(solved, self._features)
