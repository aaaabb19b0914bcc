"""TrackStar: cosines of projected gradients, normalised by second moments (Chang et al. 2024,
arXiv:2410.17413).

Written here: bergson writes gradients of a Hugging Face dataset to disk. A test compares the scores.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from stride_cli.errors import UsageError
from stride_cli.options import option
from stride_cli.randomness import stream
from stride_cli.research.methods.gradients.capture import Factors
from stride_cli.research.methods.gradients.features import (
    corpus_features,
    damped_power,
    products,
    query_features,
    second_moments,
)
from stride_cli.research.methods.gradients.passes import Passes, SumOptions, open_capture
from stride_cli.research.methods.gradients.projection import TwoSided, random_sides
from stride_cli.research.methods.protocol import takes

if TYPE_CHECKING:
    from stride_cli.data.query_set import QuerySet
    from stride_cli.data.workspace import Workspace

MOMENTS = ("adafactor", "none")
_MOMENT_CHUNKS = 1024
_WEIGHED_DOWN = 1000 / 65_536  # of the directions: the publication's


@dataclass(frozen=True)
class TrackStarOptions(SumOptions):
    method = "trackstar"
    rank: int = option(16, "Of both sides of a projection; rank² numbers a layer.", low=1)
    moments: str = option("adafactor", "Whether to divide by √V.", choices=MOMENTS)
    mix: float | str = option(0.0, "λ of the queries' moments, 0 to 1, or auto: the publication's rule.")
    damping: float = option(0.1, "Added to R, as a multiple of its mean eigenvalue.", low=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mix != "auto" and (isinstance(self.mix, str) or not 0 <= self.mix <= 1):
            raise UsageError(
                f"trackstar: mix={self.mix} is no share", fix="write mix=auto, or a number from 0 to 1"
            )


class TrackStar:
    """⟨u_q, u_i⟩ with u = R^{-½} P (∇ loss / √V), scaled to unit length.

    V is Adafactor's second moment, a product of row and column means, estimated at the model from the squared
    gradients of at most 1,024 chunks, as optimizer states are not kept. P is a two-sided random projection of
    each layer, R the second moment of the corpus's projected gradients, layer by layer. With ``mix`` it is
    λ R_queries + (1 − λ) R_corpus: directions that all queries share are weighed down, and a query's scores
    depend on the others asked with it. ``mix=auto`` (app. A.1.3 of the publication): the k-th largest
    eigenvalues of both parts are the same, over all layers, k being 1,000 of 65,536 numbers. Default layers:
    "body" for language, "all" for classifiers.

    Raises
    ------
    UsageError      an option out of range
    """

    name = "trackstar"

    @takes(TrackStarOptions)
    def __init__(self, **given: Any) -> None:
        self.options = TrackStarOptions(**given)
        self.bytes_per_chunk = 0.0

    def fit(self, workspace: Workspace) -> None:
        model, options = workspace.model, self.options
        capture = open_capture(workspace, options.layers or model.all_layers)
        self._passes = passes = Passes.of(options, capture, workspace)
        named = workspace.seed, "trackstar projection", 0, model.device
        sides = random_sides(capture.layers, options.rank, *named)
        scales = adafactor_scales(passes, workspace) if self.options.moments == "adafactor" else None
        self._projector = TwoSided(sides, scales=scales)
        features, _ = corpus_features(passes, workspace, self._projector, "TrackStar: gradients")
        self._moments = second_moments(features, self._projector.spans)
        self._features = features
        if not self.options.mix:
            self._roots = self._inverse_roots(self._moments)
            # in place, block by block: the corpus is held once
            for start in range(0, len(features), 4096):
                features[start : start + 4096] = self._whitened(features[start : start + 4096], self._roots)
        self.bytes_per_chunk = float(self._projector.width * features.itemsize)

    def score(self, queries: QuerySet) -> Iterator[np.ndarray]:
        blocks = query_features(self._passes, queries, self._projector)
        if not self.options.mix:
            for block in blocks:
                yield products(self._whitened(block, self._roots), self._features)
            return
        if not (asked := list(blocks)):
            return
        own = second_moments(np.concatenate(asked), self._projector.spans)
        share = self._found_share(own)
        mixed = [share * a + (1 - share) * b for a, b in zip(own, self._moments, strict=True)]
        roots = self._inverse_roots(mixed)
        units = [self._whitened(block, roots) for block in asked]
        scores = [np.empty((len(block), len(self._features)), np.float32) for block in units]
        for start in range(0, len(self._features), 4096):  # the whitened corpus is never whole
            part = self._whitened(self._features[start : start + 4096], roots)
            for block, found in zip(units, scores, strict=True):
                found[:, start : start + 4096] = products(block, part)
        yield from scores

    def _found_share(self, own: list[np.ndarray]) -> float:
        """Find λ from the second moments of the queries."""
        if self.options.mix != "auto":
            return float(self.options.mix)
        place = max(0, round(self._projector.width * _WEIGHED_DOWN) - 1)
        at_queries, at_corpus = (
            float(np.sort(np.concatenate([np.linalg.eigvalsh(each) for each in moments]))[::-1][place])
            for moments in (own, self._moments)
        )
        both = max(at_queries, 0.0) + max(at_corpus, 0.0)
        return max(at_corpus, 0.0) / both if both > 0 else 0.0

    def _inverse_roots(self, moments: list[np.ndarray]) -> list[np.ndarray]:
        return [damped_power(moment, self.options.damping, -0.5) for moment in moments]

    def _whitened(self, features: np.ndarray, roots: list[np.ndarray]) -> np.ndarray:
        result = np.empty_like(features)
        for span, root in zip(self._projector.spans, roots, strict=True):
            result[:, span] = features[:, span].astype(np.float64) @ root
        norms = np.linalg.norm(result, axis=1, keepdims=True)
        result /= np.where(norms > 0, norms, 1.0)
        return result


def adafactor_scales(passes: Passes, workspace: Workspace) -> list[tuple[Tensor, Tensor]]:
    """Estimate 1/√V of every layer as a product of input and output scales, V_oi = r_o c_i / mean(r).

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
