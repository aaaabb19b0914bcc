"""An honest combination: influence from the subsets, plus what overlap alone would say, kept apart."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stride_cli.attribution.lexical import SharedPairs, TfIdf
from stride_cli.errors import UsageError
from stride_cli.recovery.shrinkage import keep_top

if TYPE_CHECKING:
    from stride_cli.data.query_set import QuerySet
    from stride_cli.data.workspace import Workspace

PRIORS = ("tfidf", "pairs")
"""Names, by what they compare; with what weight: `stride_cli.attribution.defaults`."""
_STRONGEST = 100  # chunks that words are counted of, the paper's setting: weak overlap is no evidence


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
        self._method = TfIdf() if name == "tfidf" else SharedPairs()

    def fit(self, workspace: Workspace) -> None:
        """Read every chunk once.

        Raises
        ------
        UsageError      the workspace is not one of language
        """
        self._method.fit(workspace)

    def similarity(self, queries: QuerySet) -> np.ndarray:
        """(Q, n) float32 ≥ 0."""
        blocks = self._method.score(queries)
        if self.name == "tfidf":
            blocks = (keep_top(block, _STRONGEST) for block in blocks)
        return np.concatenate(list(blocks))
