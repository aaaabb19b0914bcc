"""TrackStar: cosines of projected gradients, normalised by second moments (Chang et al. 2024,
arXiv:2410.17413).

Written here: bergson's implementation writes gradients of a Hugging Face dataset to disk in several commands.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from stride_cli.methods.gradients.capture import Capture, Factors
from stride_cli.methods.gradients.features import (
    corpus_features,
    damped_power,
    products,
    query_features,
    second_moments,
)
from stride_cli.methods.gradients.passes import (
    REDUCTIONS,
    Passes,
    check_choice,
    check_positive,
)
from stride_cli.methods.gradients.projection import TwoSided, random_sides
from stride_cli.randomness import stream

if TYPE_CHECKING:
    from stride_cli.data.query_set import QuerySet
    from stride_cli.data.workspace import Workspace

MOMENTS = ("adafactor", "none")
_MOMENT_CHUNKS = 1024


class TrackStar:
    """⟨u_q, u_i⟩ with u = R^{-½} P (∇ loss / √V), scaled to unit length.

    V is Adafactor's second moment, a product of row and column means. Optimizer states are not kept with a
    model, so it is estimated at the model, from the squared gradients of at most 1,024 chunks. P is a
    two-sided random projection of each layer, R the second moment of the projected gradients of the corpus,
    layer by layer (the publication also mixes in those of the queries for tasks with a template; not done
    here).

    Parameters
    ----------
    rank : int               of both sides of a projection; rank² numbers a layer
    moments : "adafactor" | "none"      whether to divide by √V
    damping : float          added to R, as a multiple of its mean eigenvalue
    normalize : bool         unit length; without, the score is influence with the empirical Fisher matrix
    layers : str, optional   as for `Capture`; default "body" for language, "all" for classifiers
    reduction : str          as for `Passes`; matters only without unit length
    batch_tokens : int       padded tokens of one pass

    Raises
    ------
    UsageError      an option out of range
    """

    name = "trackstar"

    def __init__(
        self,
        *,
        rank: int = 16,
        moments: str = "adafactor",
        damping: float = 0.1,
        normalize: bool = True,
        layers: str | None = None,
        reduction: str = "sum",
        batch_tokens: int = 2048,
    ) -> None:
        check_positive(self.name, rank=rank, batch_tokens=batch_tokens)
        self.moments = check_choice(self.name, "moments", moments, MOMENTS)
        self.reduction = check_choice(self.name, "reduction", reduction, REDUCTIONS)
        self.rank, self.damping, self.normalize = rank, damping, normalize
        self.layers, self.batch_tokens = layers, batch_tokens
        self.bytes_per_chunk = 0.0

    def fit(self, workspace: Workspace) -> None:
        layers = self.layers or workspace.model.all_layers
        capture = Capture(workspace.model, workspace.chunks.batch(np.arange(1)), layers=layers)
        self._passes = passes = Passes(capture, self.batch_tokens, self.reduction, workspace.seed)
        sides = random_sides(
            capture.layers, self.rank, workspace.seed, "trackstar projection", 0, workspace.model.device
        )
        scales = adafactor_scales(passes, workspace) if self.moments == "adafactor" else None
        self._projector = TwoSided(sides, scales=scales)
        features, _ = corpus_features(passes, workspace, self._projector, "TrackStar: gradients")
        self._roots = [
            damped_power(moment, self.damping, -0.5)
            for moment in second_moments(features, self._projector.spans)
        ]
        # in place, block by block: the corpus is held once
        for start in range(0, len(features), 4096):
            features[start : start + 4096] = self._whitened(features[start : start + 4096])
        self._features = features
        self.bytes_per_chunk = float(self._projector.width * features.itemsize)

    def score(self, queries: QuerySet) -> Iterator[np.ndarray]:
        for block in query_features(self._passes, queries, self._projector):
            yield products(self._whitened(block), self._features)

    def _whitened(self, features: np.ndarray) -> np.ndarray:
        result = np.empty_like(features)
        for span, root in zip(self._projector.spans, self._roots, strict=True):
            result[:, span] = features[:, span].astype(np.float64) @ root
        if self.normalize:
            norms = np.linalg.norm(result, axis=1, keepdims=True)
            result /= np.where(norms > 0, norms, 1.0)
        return result


def adafactor_scales(passes: Passes, workspace: Workspace) -> list[tuple[Tensor, Tensor]]:
    """1/√V of every layer as a product of input and output scales, V_oi = r_o c_i / mean(r).

    r and c are the means of squared gradients over columns and rows (Shazeer and Stern 2018,
    arXiv:1804.04235).

    Returns
    -------
    list of (s_in (n_in,), s_out (n_out,)) float32
    """
    size = min(_MOMENT_CHUNKS, workspace.n_chunks)
    random = stream(workspace.seed, "adafactor sample")
    rows = np.sort(random.choice(workspace.n_chunks, size, replace=False))
    device = workspace.model.device
    sums = [
        (torch.zeros(layer.n_in, device=device), torch.zeros(layer.n_out, device=device))
        for layer in passes.capture.layers
    ]

    def visit(found: Factors) -> None:
        columns, lines = sums[found.layer]
        for block in found.blocks():
            squares = block.gradients().square_().sum(dim=0)
            columns += squares.mean(dim=0)
            lines += squares.mean(dim=1)

    for _ in passes.corpus(workspace.chunks, visit, "TrackStar: second moments", rows=rows):
        pass
    scales = []
    for columns, lines in sums:
        # what never has a gradient is left out instead of divided by zero
        columns, lines = columns / size, lines / size
        s_out = torch.where(lines > 0, (lines / lines.mean().clamp_min(1e-38)).rsqrt(), 0.0)
        scales.append((torch.where(columns > 0, columns.rsqrt(), 0.0), s_out))
    return scales
