"""Spread of influence over the chunks: sparsity, Gini, coverage, active sets, concentration curves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from stride_cli.research.evaluation.metrics import active_set, gini, top_coverage, zero_share

if TYPE_CHECKING:
    from stride_cli.research.evaluation.records import CurvePoint

CURVE_POINTS = 33
FIELDS = (
    "sparsity", "gini", "top10_coverage", "active_mean", "active_p50", "active_p90", "empty_queries",
)  # fmt: skip


@dataclass(frozen=True)
class Distribution:
    """The shape of the scores of Q queries over n chunks (app:metrics, Score Distribution and Fit Quality).

    Attributes
    ----------
    zeros, gini, coverage : (Q,) float64      gini and coverage are NaN where every score is zero
    active : (Q,) int64                       |A|
    curve_share, curve_mass : (P,) float64    mean part of Σ|w| that the top share of the chunks holds
                                              (eq:normalized-influence-mass)
    n_chunks : int
    """

    zeros: np.ndarray
    gini: np.ndarray
    coverage: np.ndarray
    active: np.ndarray
    curve_share: np.ndarray
    curve_mass: np.ndarray
    n_chunks: int

    def to_record(self) -> dict[str, Any]:
        """Average over queries, by `FIELDS`."""
        values = (
            float(self.zeros.mean()),
            _mean(self.gini),
            _mean(self.coverage),
            float(self.active.mean()),
            float(np.quantile(self.active, 0.5)),
            float(np.quantile(self.active, 0.9)),
            int(np.isnan(self.gini).sum()),
        )
        return dict(zip(FIELDS, values, strict=True))

    def curve(self) -> list[CurvePoint]:
        """List the concentration curve as points of share and mass."""
        pairs = zip(self.curve_share.tolist(), self.curve_mass.tolist(), strict=True)
        return [{"share": share, "mass": mass} for share, mass in pairs]


class DistributionCounter:
    """Takes blocks of scores as they come and keeps a few numbers a query."""

    def __init__(self) -> None:
        self._parts: list[tuple[np.ndarray, ...]] = []
        self._counts = np.zeros(0, np.int64)
        self._n_chunks = 0

    def add(self, block: np.ndarray) -> Self:
        """Count a block of finite scores, (q, n); return itself."""
        if not self._n_chunks:
            self._n_chunks = block.shape[1]
            grid = np.geomspace(1, self._n_chunks, CURVE_POINTS)
            self._counts = np.unique(np.round(grid).astype(np.int64))
        part = (zero_share(block), gini(block), top_coverage(block), active_set(block))
        size = -np.sort(-np.abs(block).astype(np.float64), axis=1)
        held = np.cumsum(size, axis=1)
        none = np.zeros((len(block), len(self._counts)))
        curve = np.divide(held[:, self._counts - 1], held[:, -1:], out=none, where=held[:, -1:] > 0)
        self._parts.append((*part, curve))
        return self

    def result(self) -> Distribution:
        zeros, ginis, coverage, active, curves = (
            np.concatenate(part) for part in zip(*self._parts, strict=True)
        )
        some = ~np.isnan(ginis)
        mass = curves[some].mean(axis=0) if some.any() else np.zeros(len(self._counts))
        share = self._counts / self._n_chunks
        return Distribution(zeros, ginis, coverage, active, share, mass, self._n_chunks)


def _mean(values: np.ndarray) -> float | None:
    some = values[~np.isnan(values)]
    return float(some.mean()) if len(some) else None
