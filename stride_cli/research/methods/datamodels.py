"""Datamodels: linear regression from retrained subsets to losses (Ilyas et al. 2022), by Lasso or ridge."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from stride_cli.errors import UsageError, required
from stride_cli.output import note
from stride_cli.research.methods.protocol import query_blocks
from stride_cli.research.methods.truth_folds import LearnsFromTruth, check_folds, training_rows

if TYPE_CHECKING:
    from stride_cli.data.query_set import QuerySet
    from stride_cli.data.workspace import Workspace
    from stride_cli.research.training.truth import Truth

OUTPUTS = ("loss", "margin")
_GRAM_CHUNKS = 65_536  # columns of the masks that are float64 at once
_PENALTIES = 20


class Datamodels(LearnsFromTruth):
    """Coefficients of a linear model of a query's loss in "chunk i is in the subset".

    Fitted on all folds but one of the index's truth (`stride evaluate truth`); only the other may judge it,
    and only the truth's own queries can be scored. Scores are minus the coefficients of the loss (plus those
    of the margin), in nats per chunk.

    Parameters
    ----------
    fold, folds : int           which part is kept for scoring, of how many
    alpha : float, optional     use only subsets of this share of the chunks
    output : str                "loss", or "margin" (classifiers only)

    Attributes
    ----------
    used_truth_rows : (R,) bool
        After `fit`: rows of `Truth.from_index(index)`, every α included, that were fitted on.

    Raises
    ------
    UsageError            an option out of range, or too few subsets
    QueryError            a query that the truth does not have
    StageMissing          the index has no truth
    MissingExtraError     scikit-learn is not installed (Lasso)
    """

    name = "datamodels"
    bytes_per_chunk = 0.0

    def __init__(
        self, *, fold: int = 0, folds: int = 2, alpha: float | None = None, output: str = "loss"
    ) -> None:
        if output not in OUTPUTS:
            raise UsageError(f"{self.name}: output should be {' or '.join(OUTPUTS)}, found '{output}'")
        check_folds(fold, folds, self.name)
        self.output = output
        self.fold, self.folds, self.alpha = fold, folds, alpha

    def fit(self, workspace: Workspace) -> None:
        from stride_cli.research.training.truth import Truth

        self.fit_truth(Truth.from_index(workspace.index), seed=workspace.seed)

    def fit_truth(self, truth: Truth, *, seed: int) -> None:
        """Fit on a truth in memory."""
        used = training_rows(truth.alpha, self.fold, self.folds, seed, alpha=self.alpha)
        part = self.learn_from(truth, used, least=5, name=self.name)
        outcomes = part.losses if self.output == "loss" else part.margins
        if outcomes is None:
            raise UsageError(f"{self.name}: the truth has no margins", fix="use output=loss")
        sign = -1.0 if self.output == "loss" else 1.0
        self._masks = part.masks  # (R', n)
        self._targets = sign * outcomes.mean(1)  # (R', Q), higher is better
        self._known = truth.queries
        self.bytes_per_chunk = len(self._masks) / 8  # masks, a bit a subset, as the truth keeps them

    def score(self, queries: QuerySet) -> Iterator[np.ndarray]:
        from stride_cli.research.training.truth import match_queries

        found = match_queries(queries, self._known)
        for rows in query_blocks(queries):
            yield self._coefficients(self._targets[:, found[rows]])

    def _coefficients(self, targets: np.ndarray) -> np.ndarray:
        """Fit targets (R', q): (q, n) float32."""
        return lasso_coefficients(self._masks, targets)


class DsDm(Datamodels):
    """Datamodels by ridge regression, the estimate that DsDm selects data with (Engstrom et al. 2024).

    The public code of DsDm estimates its datamodels by TRAK to spare the retraining: that is the method
    `trak`. Here they come from retrained subsets. Parameters and attributes as `Datamodels`.
    """

    name = "dsdm"

    def fit_truth(self, truth: Truth, *, seed: int) -> None:
        """Fit on a truth in memory."""
        super().fit_truth(truth, seed=seed)
        self._ridge = RidgeRegression(self._masks)

    def _coefficients(self, targets: np.ndarray) -> np.ndarray:
        return self._ridge.coefficients(targets)


class RidgeRegression:
    """Ridge regression with many more columns than rows, in the dual; the penalty by leave-one-out.

    min_w ½‖y − b − M w‖² + ½λ‖w‖², b free. λ is, for every target, the one of 20 between 1e-4 and 1e4 times
    the mean eigenvalue of the centred Gram matrix whose exact leave-one-out error is smallest.

    Parameters
    ----------
    masks : (R, n) bool
    """

    def __init__(self, masks: np.ndarray) -> None:
        self._masks = masks
        self._means = masks.mean(0)  # (n,)
        n_rows = len(masks)
        gram = np.zeros((n_rows, n_rows))
        for start in range(0, masks.shape[1], _GRAM_CHUNKS):
            part = self._part(start)
            gram += part @ part.T
        values, self._vectors = np.linalg.eigh(gram)
        self._values = np.maximum(values, 0)
        self._penalties = max(self._values.mean(), 1e-12) * np.geomspace(1e-4, 1e4, _PENALTIES)

    def coefficients(self, targets: np.ndarray) -> np.ndarray:
        """Coefficients (q, n) float32 of targets (R, q)."""
        centred = targets - targets.mean(0)
        rotated = self._vectors.T @ centred  # (R, q)
        errors = []
        for penalty in self._penalties:
            shrink = self._values / (self._values + penalty)
            fitted = self._vectors @ (shrink[:, None] * rotated)
            leverage = (self._vectors**2) @ shrink + 1 / len(targets)  # of the intercept too
            left_out = (centred - fitted) / np.maximum(1 - leverage, 1e-9)[:, None]
            errors.append((left_out**2).sum(0))
        chosen = self._penalties[np.argmin(errors, axis=0)]  # (q,)
        dual = self._vectors @ (rotated / (self._values[:, None] + chosen))  # (R, q)
        block = np.empty((targets.shape[1], self._masks.shape[1]), np.float32)
        for start in range(0, self._masks.shape[1], _GRAM_CHUNKS):
            part = self._part(start)
            block[:, start : start + part.shape[1]] = dual.T @ part
        return block

    def _part(self, start: int) -> np.ndarray:
        stop = start + _GRAM_CHUNKS
        return self._masks[:, start:stop] - self._means[start:stop]


def lasso_coefficients(masks: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Lasso coefficients of every target in the masks, by scikit-learn.

    min_w 1/(2R)‖y − b − M w‖² + λ‖w‖₁, λ of 20 between λ_max and λ_max/100 by 5-fold cross-validation for
    every target; all zero where nothing predicts better than the mean. Takes 8 R n bytes.

    Parameters
    ----------
    masks : (R, n) bool
    targets : (R, q) float64

    Returns
    -------
    ndarray (q, n) float32
    """
    sklearn = required("sklearn.linear_model", "baselines", "scikit-learn")
    from sklearn.exceptions import ConvergenceWarning

    centred = np.asfortranarray(masks - masks.mean(0))
    block = np.zeros((targets.shape[1], masks.shape[1]), np.float32)
    unfinished = 0
    for coefficients, target in zip(block, targets.T, strict=True):
        wanted = target - target.mean()
        scale = wanted.std()
        if scale == 0:
            continue
        highest = np.abs(centred.T @ wanted).max() / len(wanted) / scale
        if highest == 0:
            continue
        penalties = highest * np.geomspace(1, 0.01, _PENALTIES)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", ConvergenceWarning)
            solver = sklearn.LassoCV(alphas=penalties, cv=5, max_iter=10_000)
            solver.fit(centred, wanted / scale)
        unfinished += any(issubclass(warning.category, ConvergenceWarning) for warning in caught)
        coefficients[:] = solver.coef_ * scale
    if unfinished:
        note(f"datamodels: the Lasso of {unfinished} of {len(block)} queries missed its tolerance at some λ")
    return block
