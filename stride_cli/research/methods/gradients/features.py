"""Projected gradients of chunks and queries as rows of a matrix, and the solvers on them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Self

import numpy as np
import torch
from torch import Tensor

from stride_cli.research.methods.gradients.capture import Factors
from stride_cli.research.methods.gradients.passes import Passes
from stride_cli.research.methods.gradients.projection import Projector
from stride_cli.research.methods.protocol import query_blocks

if TYPE_CHECKING:
    from stride_cli.data.query_set import QuerySet
    from stride_cli.data.workspace import Workspace

_SCORE_FLOATS = 1 << 26  # features converted to float32 at once


class _Collector:
    """A visitor that adds projected gradients up over layers."""

    def __init__(self, projector: Projector) -> None:
        self._projector = projector
        self._target: Tensor | None = None

    def __call__(self, found: Factors) -> None:
        if self._target is None or len(self._target) < found.rows.stop:
            grown = torch.zeros(found.rows.stop, self._projector.width, device=found.inputs.device)
            if self._target is not None:
                grown[: len(self._target)] = self._target
            self._target = grown
        self._projector.add(found, self._target)

    def take(self, rows: int) -> Tensor:
        """Take the first rows; the next batch starts from zero."""
        assert self._target is not None
        found, self._target = self._target[:rows], None
        return found


def corpus_features(
    passes: Passes, workspace: Workspace, projector: Projector, title: str, *, output: str = "loss"
) -> tuple[np.ndarray, np.ndarray]:
    """Project the gradients of all chunks.

    Returns
    -------
    features : (n, width) float32
    doubt : (n,) float64         mean of 1 − p over a chunk's scored tokens
    """
    features = np.zeros((workspace.n_chunks, projector.width), np.float32)
    doubt = np.zeros(workspace.n_chunks)
    collect = _Collector(projector)
    for batch, outcome in passes.corpus(workspace.chunks, collect, title, output=output):
        features[batch.rows] = collect.take(len(batch.rows)).cpu().numpy()
        doubt[batch.rows] = outcome.doubt.cpu().numpy()
    return features, doubt


def query_features(
    passes: Passes, queries: QuerySet, projector: Projector, *, output: str = "loss"
) -> Iterator[np.ndarray]:
    """Project the gradients of the queries: blocks (q ≤ QUERY_BLOCK, width) float32."""
    collect = _Collector(projector)
    for rows in query_blocks(queries):
        parts = []
        for _, batch in passes.query_batches(queries, int(rows[0]), int(rows[-1]) + 1):
            passes.queries(batch, collect, output=output)
            parts.append(collect.take(len(batch.rows)).cpu().numpy())
        yield np.concatenate(parts)


def second_moments(features: np.ndarray, spans: Sequence[slice]) -> list[np.ndarray]:
    """Compute ΦᵀΦ / n of each span, (k, k) float64."""
    found = []
    for span in spans:
        total = np.zeros((span.stop - span.start,) * 2)
        at_once = max(1, _SCORE_FLOATS // (span.stop - span.start))
        for start in range(0, len(features), at_once):
            part = features[start : start + at_once, span].astype(np.float64)
            total += part.T @ part
        found.append(total / max(1, len(features)))
    return found


def sampled_moments(
    passes: Passes, workspace: Workspace, projector: Projector, title: str, draws: int
) -> list[np.ndarray]:
    """Compute `second_moments` of gradients with labels drawn from the model: the projected Gauss–Newton
    matrix."""
    totals = [np.zeros((span.stop - span.start,) * 2) for span in projector.spans]
    collect = _Collector(projector)
    for draw in range(draws):
        for batch, _ in passes.corpus(workspace.chunks, collect, title, labels="sampled", draw=draw):
            part = collect.take(len(batch.rows)).double().cpu().numpy()
            for total, span in zip(totals, projector.spans, strict=True):
                total += part[:, span].T @ part[:, span]
    return [total / (draws * workspace.n_chunks) for total in totals]


def damped_power(matrix: np.ndarray, damping: float, power: float) -> np.ndarray:
    """Compute (matrix + damping · mean eigenvalue · I)**power, float64, of a positive semi-definite matrix.

    Eigenvalues that are zero to rounding stay zero where there is no damping (a pseudo-inverse).
    """
    values, vectors = np.linalg.eigh(matrix)
    values = np.maximum(values, 0.0)
    floor = values.max(initial=0.0) * len(values) * np.finfo(np.float32).eps
    shifted = values + damping * values.mean()
    kept = shifted > (floor if damping == 0 else 0.0)
    powers = np.zeros_like(shifted)
    powers[kept] = shifted[kept] ** power
    return (vectors * powers) @ vectors.T


class Solver:
    """``v ↦ (H + γ I)⁻¹ v``, with γ a multiple of the mean eigenvalue of H."""

    def __init__(self, inverse: np.ndarray, rows: np.ndarray | None = None, elsewhere: float = 0.0) -> None:
        self._inverse, self._rows, self._elsewhere = inverse, rows, elsewhere

    @classmethod
    def of_moment(cls, moment: np.ndarray, damping: float) -> Self:
        """Solve with H (k, k)."""
        return cls(damped_power(moment, damping, -1.0))

    @classmethod
    def of_rows(cls, features: np.ndarray, damping: float) -> Self:
        """Solve with H = ΦᵀΦ / n, Φ (n, k), which is not copied.

        With fewer rows than columns the rows' products are inverted, in n³ instead of k³ (Woodbury).
        """
        n, k = features.shape
        if n >= k:
            return cls.of_moment(second_moments(features, [slice(0, k)])[0], damping)
        wide = features.astype(np.float64)
        values, vectors = np.linalg.eigh(wide @ wide.T / n)  # H's eigenvalues that are not zero
        values = np.maximum(values, 0.0)
        gamma = damping * values.sum() / k
        elsewhere = 1.0 / gamma if gamma > 0 else 0.0
        # H's own directions are Φᵀ U / √(n s): (s + γ)⁻¹ along them, γ⁻¹ elsewhere
        there = values > values.max(initial=0.0) * n * np.finfo(np.float32).eps
        factors = np.zeros_like(values)
        factors[there] = (1.0 / (values[there] + gamma) - elsewhere) / (n * values[there])
        return cls((vectors * factors) @ vectors.T, features, elsewhere)

    def __call__(self, vectors: np.ndarray) -> np.ndarray:
        """Solve for vectors (q, k): (q, k) float64."""
        vectors = vectors.astype(np.float64)
        if self._rows is None:
            return vectors @ self._inverse
        rows = self._rows.astype(np.float64)
        return self._elsewhere * vectors + (vectors @ rows.T) @ self._inverse @ rows


def products(vectors: np.ndarray, features: np.ndarray) -> np.ndarray:
    """Compute vectors (q, k) · features (n, k)ᵀ: (q, n) float32."""
    vectors = np.asarray(vectors, np.float32)
    result = np.empty((len(vectors), len(features)), np.float32)
    at_once = max(1, _SCORE_FLOATS // max(1, features.shape[1]))
    for start in range(0, len(features), at_once):
        result[:, start : start + at_once] = vectors @ features[start : start + at_once].T
    return result
