"""Folds of the retrained subsets: methods that learn from some of them are judged by the others."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stride_cli.errors import UsageError
from stride_cli.randomness import stream

if TYPE_CHECKING:
    from stride_cli.research.training.truth import Truth


class LearnsFromTruth:
    """A method that takes a share of an index's truth and says which.

    Attributes
    ----------
    used_truth_rows : (R,) bool
        The rows of `Truth.from_index(index)`, every α included, that were learned from.
    """

    used_truth_rows: np.ndarray

    def learn_from(self, truth: Truth, used: np.ndarray, *, least: int, name: str) -> Truth:
        """Record the rows (R,) bool that are learned from, and take them.

        Raises
        ------
        UsageError      fewer rows than `least`
        """
        if used.sum() < least:
            raise UsageError(
                f"{name}: {used.sum()} retrained subsets are left to learn from, expected {least} or more",
                fix="stride evaluate truth --subsets 100",
            )
        self.used_truth_rows = used
        return truth.take(np.flatnonzero(used))


def training_rows(
    alphas: np.ndarray, fold: int, folds: int, seed: int, *, alpha: float | None = None
) -> np.ndarray:
    """Mark the rows of a truth that may be learned from: (R,) bool, False for the fold kept for scoring.

    Rows are dealt into folds at random within each α: every fold has its share of every α, and all methods
    with the same folds keep the same rows.

    Parameters
    ----------
    alphas : (R,) float64       share of the chunks in each row's subset
    fold, folds : int           the fold kept for scoring, of how many
    alpha : float, optional     rows of another α are not used either
    """
    used = np.zeros(len(alphas), bool)
    shares = np.round(np.asarray(alphas) * 1000).astype(np.int64)
    for share in np.unique(shares):
        if alpha is not None and share != round(alpha * 1000):
            continue
        rows = np.flatnonzero(shares == share)
        dealt = stream(seed, "truth folds", int(share)).permutation(len(rows)) % folds
        used[rows[dealt != fold]] = True
    return used


def check_folds(fold: int, folds: int, name: str) -> None:
    """Raise UsageError unless there are 2 folds or more and `fold` is one of them."""
    if folds < 2 or not 0 <= fold < folds:
        raise UsageError(
            f"{name}: folds should be 2 or more and fold between 0 and folds − 1, found {fold} of {folds}",
            fix="write folds=2,fold=0",
        )
