"""An honest combination: influence from the subsets, plus what likeness alone would say, kept apart."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from stride_cli.errors import UsageError
from stride_cli.recovery.shrinkage import keep_top
from stride_cli.research.methods.states import AlikeStates
from stride_cli.research.methods.words import SharedPairs, TfIdf

if TYPE_CHECKING:
    from stride_cli.data.query_set import QuerySet
    from stride_cli.data.workspace import Workspace

_SIMILARITIES: dict[str, Any] = {"tfidf": TfIdf, "pairs": SharedPairs, "states": AlikeStates}
PRIORS = tuple(_SIMILARITIES)
"""Names, by what they compare; with what weight: `stride_cli.attribution.defaults`."""
_STRONGEST = 100  # chunks that words are counted of, the paper's setting: weak overlap is no evidence


def check_prior(name: str) -> None:
    """Raise UsageError where there is no prior of that name."""
    if name not in PRIORS:
        raise UsageError(f"there is no prior '{name}'", fix=f"use {', '.join(PRIORS[:-1])} or {PRIORS[-1]}")


class Prior:
    """What the chunks share with a query: words by TF-IDF, pairs of neighbouring tokens, or the states from
    which the model says them.

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
        self._method: TfIdf | SharedPairs | AlikeStates = _SIMILARITIES[name]()

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
