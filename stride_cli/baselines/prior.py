"""An honest combination: influence from the subsets, plus what overlap alone would say, kept apart."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stride_cli.baselines.protocol import score_all
from stride_cli.baselines.registry import open_method
from stride_cli.errors import UsageError

if TYPE_CHECKING:
    from stride_cli.baselines.protocol import Task
    from stride_cli.measurement.query_set import QuerySet

PRIORS = {
    # the paper's settings; a query's 100 best chunks, as weak overlap is no evidence
    "tfidf": "tfidf:top=100",
    "pairs": "pairs",
}
"""Names, and the baseline that each adds; with what weight: `stride_cli.recovery.defaults`."""
LEAST_TRUST = 0.05  # below, influences do not take part in the ranking to speak of


def check_prior(name: str) -> None:
    """Raise UsageError where there is no prior of that name."""
    if name not in PRIORS:
        raise UsageError(f"there is no prior '{name}'", fix=f"use {' or '.join(PRIORS)}")


class LexicalPrior:
    """What the chunks share with a query: words by TF-IDF, or pairs of neighbouring tokens.

    Parameters
    ----------
    name : str      one of `PRIORS`

    Raises
    ------
    UsageError            another name
    MissingExtraError     tfidf: scikit-learn is not installed (from `fit`)
    """

    def __init__(self, name: str) -> None:
        check_prior(name)
        self.name = name
        self._method = open_method(PRIORS[name])

    def fit(self, task: Task) -> None:
        """Read every chunk once.

        Raises
        ------
        UsageError      the task is not one of language
        """
        self._method.fit(task)

    def similarity(self, queries: QuerySet) -> np.ndarray:
        """(Q, n) float32 ≥ 0."""
        return score_all(self._method, queries)


def prior_parts(
    weights: np.ndarray, similarity: np.ndarray, share: float, trust: np.ndarray | float = 1.0
) -> np.ndarray:
    """What the prior adds to each chunk's influence, in the unit of the weights.

        part_i = share / trust · sd(w) / sd(s) · s_i,     0 where w_i < 0: what opposes is left as it is

    Parameters
    ----------
    weights, similarity : (..., n)      of the same queries
    share : float                       spread of the prior over chunks as a share of the influences' spread
    trust : (...,) or float             `stride_cli.recovery.refinement.trust`: where the subsets are too few
                                        to tell much, the prior decides

    Returns
    -------
    ndarray (..., n) float64 ≥ 0; all 0 where either side is constant over the chunks
    """
    weights = np.asarray(weights, np.float64)
    similarity = np.asarray(similarity, np.float64)
    spread = similarity.std(axis=-1, keepdims=True)
    wanted = share / np.maximum(np.asarray(trust, np.float64)[..., None], LEAST_TRUST)
    scale = np.divide(
        wanted * weights.std(axis=-1, keepdims=True), spread, out=np.zeros_like(spread), where=spread > 0
    )
    return np.where(weights < 0.0, 0.0, scale * similarity)
