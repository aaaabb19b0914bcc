"""The inner problem on some of the subsets only: columns of different lengths, the other rows left out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from stride_cli.recovery.pool import Penalty, Pool
from stride_cli.startup import compiled


class PartPool(Pool):
    """`Pool` for the rows `kept` of M and y.

    Vectors keep their K entries, so that the same passes serve: those of the rows left out are zero, always.
    In a collected column, such rows all read as one of them and come last, behind the `sizes` rows that are
    kept: columns that differ in nothing else are one variable.

    Parameters
    ----------
    target : (P,) float64      y_c of the P kept rows
    kept : (K,) bool           at least one row is not
    """

    def __init__(self, target: np.ndarray, kept: np.ndarray, degree: int, dtype: np.dtype) -> None:
        whole = np.zeros(len(kept))
        whole[kept] = target
        super().__init__(whole, degree, dtype)
        self.kept = kept
        self._rows = np.flatnonzero(kept)
        self._blank = int(np.flatnonzero(~kept)[0])

    def replace(self, ids: np.ndarray, rows: np.ndarray) -> None:
        last = len(self.kept)
        ordered = np.where(self.kept[rows], rows, last).astype(np.int64)
        ordered.sort(axis=1)
        ordered[ordered == last] = self._blank
        super().replace(ids, ordered.astype(rows.dtype))

    def emptied(self) -> Pool:
        return PartPool(self.target[self.kept], self.kept, self.rows.shape[1], self.rows.dtype)

    def refresh_residual(self, penalty: Penalty) -> None:
        super().refresh_residual(replace(penalty, intercept=False))
        self.residual[~self.kept] = 0.0
        if penalty.intercept:
            self.residual[self._rows] -= self.residual[self._rows].mean()

    def sweep(self, penalty: Penalty, order: np.ndarray, n_epochs: int, threshold: float) -> int:
        sizes = self.kept[self.rows].sum(axis=1)
        return int(
            descend_part_kernel(
                self.rows, sizes, self.weights, self.residual, penalty.lambda_, self._rows,
                penalty.intercept, penalty.nonneg, order, n_epochs, threshold,
            )
        )  # fmt: skip

    def thin(self, penalty: Penalty) -> None:
        """Nothing: more non-zeros than rows do no harm where solutions are only compared."""

    def settle(self, penalty: Penalty, goal: float) -> bool:
        """Nothing: coordinate rounds end by the residual's own certificate."""
        return False

    def _newton(self, penalty: Penalty, goal: float, max_steps: int) -> float:
        return -np.inf  # coordinate rounds only


@compiled
def descend_part_kernel(
    rows, sizes, weights, residual, penalty, kept, centred, nonneg, order, n_epochs, threshold
):
    """`kernels.descend_kernel` for columns whose first `sizes[i]` rows count, among the rows `kept` (P,).

    The other entries of a column point at a row whose residual is zero, and stays so.
    """
    n_kept = kept.shape[0]
    mean = 0.0
    epochs = 0
    for _ in range(n_epochs):
        epochs += 1
        biggest = 0.0
        for at in range(order.shape[0]):
            i = order[at]
            size = sizes[i]
            norm = size - size * size / n_kept if centred else float(size)
            old = weights[i]
            new = 0.0
            if norm > 0.0:  # else in none of the rows, or in all: it explains nothing
                product = -size * mean
                for j in range(size):
                    product += residual[rows[i, j]]
                target = product + norm * old
                if target > penalty:
                    new = (target - penalty) / norm
                elif target < -penalty and not nonneg:
                    new = (target + penalty) / norm
            step = new - old
            if step != 0.0:
                weights[i] = new
                for j in range(size):
                    residual[rows[i, j]] -= step
                if centred:
                    mean -= step * size / n_kept
                biggest = max(biggest, abs(step) * norm)
        if biggest <= threshold:
            break
    if mean != 0.0:
        for at in range(n_kept):
            residual[kept[at]] -= mean
    return epochs
