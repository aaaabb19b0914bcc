"""An honest combination: influence from the subsets, plus what overlap alone would say, kept apart."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stride_cli.errors import UsageError
from stride_cli.methods.protocol import score_all
from stride_cli.methods.registry import open_method

if TYPE_CHECKING:
    from stride_cli.data.query_set import QuerySet
    from stride_cli.methods.protocol import Task

PRIORS = {
    # the paper's settings; a query's 100 best chunks, as weak overlap is no evidence
    "tfidf": "tfidf:top=100",
    "pairs": "pairs",
}
"""Names, and the baseline that each adds; with what weight: `stride_cli.attribution.defaults`."""


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
