"""Recall: a bound on how many of the strongest chunks have exact values, at a stated confidence.

Each chunk without an exact value has an estimate whose error is known, and so a probability of being above
any threshold (`recovery.posterior`). Summed, these say how many others are to be expected above the strongest
exact value, the second, and so on. They are all but independent, and their number is Poisson.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from stride_cli.schema.derivation import key

TOP = 10
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Recall:
    """With this confidence, at least so many of the `top` chunks of largest influence have been read."""

    top: int = key("the chunks of largest influence that this is about")
    at_least: int = key("so many of them are among those that were read, or more")
    confidence: float = key("share of queries of which that is true, at least")


def stated_recall(
    influences: np.ndarray, above: np.ndarray, n_chunks: int, *, confidence: float = CONFIDENCE
) -> Recall:
    """State how many of the strongest chunks are among those with exact values.

    Parameters
    ----------
    influences : (t,) float64      exact values
    above : (min(t, TOP),) float64  how many other chunks are to be expected above the strongest of them, the
                                    second, …
    n_chunks : n                   all there are
    """
    from scipy.special import pdtr  # takes a tenth of a second to import

    top = min(TOP, n_chunks)
    if len(influences) >= n_chunks:
        return Recall(top, top, confidence)
    # the a-th strongest of them is one of the top where no more than top − a others are above it
    ranks = np.arange(1, min(top, len(above)) + 1)
    held = pdtr(top - ranks, above[: len(ranks)]) >= confidence  # Poisson
    return Recall(top, int(ranks[held].max(initial=0)), confidence)
