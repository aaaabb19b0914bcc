"""TRAK: influence in a linearised model of the margin (Park et al. 2023, arXiv:2303.14186).

Written here: `traker` has no CPU projector that is not dense, and no task for language modelling. A test
compares the formulas.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from stride_cli.options import option
from stride_cli.research.methods.gradients.features import Solver, corpus_features, products, query_features
from stride_cli.research.methods.gradients.passes import Passes, PassOptions, find_checkpoints, open_capture
from stride_cli.research.methods.gradients.projection import Projector, random_projector
from stride_cli.research.methods.protocol import takes

if TYPE_CHECKING:
    from stride_cli.data.query_set import QuerySet
    from stride_cli.data.workspace import Workspace

_DIM = 2048


@dataclass(frozen=True)
class TRAKOptions(PassOptions):
    method = "trak"
    layers: str | None = option("all", "Linear layers that count, see `Capture`.")
    dim: int | None = option(
        None, "Numbers a gradient is projected to; default: 2,048, at most a quarter of the chunks.", low=1
    )
    checkpoints: str | None = option(None, "Independently trained models, separated by |.")
    damping: float = option(0.1, "λ as a multiple of the mean eigenvalue of ΦᵀΦ; 0: pseudo-inverse.", low=0)


class TRAK:
    """mean_m[φ_qᵀ (ΦᵀΦ)⁻¹ φ_i] · mean_m[1 − p_i] over models m.

    φ is the projected gradient of log(p / (1 − p)), for a sequence summed over its scored tokens; 1 − p is
    their mean. Every model has a projection of its own, and all count the same. With as many dimensions as
    chunks ΦᵀΦ would fit every one of them, hence the default. On digits a damping of .1 and 1 predicted
    retrained models better than .01 (the publication has none).

    Raises
    ------
    UsageError      an option out of range
    """

    name = "trak"

    @takes(TRAKOptions)
    def __init__(self, **given: Any) -> None:
        self.options = TRAKOptions(**given)
        self.checkpoints = find_checkpoints(self.options.checkpoints, None)
        self.bytes_per_chunk = 0.0
        self._opened: tuple[Passes, Projector] | None = None  # kept where there is one model only

    def fit(self, workspace: Workspace) -> None:
        self._task, self._opened = workspace, None
        self._features: list[np.ndarray] = []  # (n, dim) per model: φ_i
        self._solvers: list[Solver] = []
        doubts = np.zeros(workspace.n_chunks)
        for number in range(len(self.checkpoints)):
            passes, projector = self._open(number)
            title = f"TRAK: gradients {number + 1}/{len(self.checkpoints)}"
            features, doubt = corpus_features(passes, workspace, projector, title, output="margin")
            self._solvers.append(Solver.of_rows(features, self.options.damping))  # of ΦᵀΦ / n
            self._features.append(features)
            doubts += doubt / len(self.checkpoints)
        self._doubts = doubts.astype(np.float32)
        self.bytes_per_chunk = float(sum(f.shape[1] * f.itemsize for f in self._features) + 4)

    def score(self, queries: QuerySet) -> Iterator[np.ndarray]:
        # one model is held at a time, so each sees all queries
        solved: list[list[np.ndarray]] = []
        for number, solver in enumerate(self._solvers):
            passes, projector = self._open(number)
            blocks = query_features(passes, queries, projector, output="margin")
            solved.append([solver(block) / self._task.n_chunks for block in blocks])
        for blocks_of_models in zip(*solved, strict=True):
            total = np.zeros((len(blocks_of_models[0]), self._task.n_chunks), np.float32)
            for block, features in zip(blocks_of_models, self._features, strict=True):
                total += products(block, features)
            yield total * self._doubts / np.float32(len(self.checkpoints))

    def _open(self, number: int) -> tuple[Passes, Projector]:
        if self._opened is not None:
            return self._opened
        workspace = self._task
        dim = self.options.dim or max(1, min(_DIM, workspace.n_chunks // 4))
        model = self.checkpoints[number].load(workspace)
        capture = open_capture(workspace, self.options.layers or "all", model)
        projector = random_projector(
            capture.layers, dim, workspace.seed, "trak projection", number, model.device
        )
        opened = Passes(capture, self.options.batch_tokens, "sum", workspace.seed), projector
        if len(self.checkpoints) == 1:
            self._opened = opened
        return opened
