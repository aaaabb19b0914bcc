"""Recall: a bound on how many of the strongest chunks were read, at a stated confidence.

Chunks are read because their estimates rank highest, and the errors of projections' estimates are known:
Gaussian, of a size that every chunk and query tells. So each chunk that was read has a probability of having
been read: by how much its estimate could have been lower, in units of that error. A chunk as strong, and as
likely to be read, has been missed as often as a coin of that chance fails before it succeeds. Summed over the
strongest that were found, this is how many of their like were left out (Horvitz and Thompson, JASA 47, 1952;
the counts are negative binomial). Nothing is assumed of how influences are distributed.

That is blind to chunks unlike all that were found: where few are read, several as strong may each have been
unlikely to be. So the others that are to be expected above are counted, too, from their estimates and the
distribution of influences (`recovery.posterior`). They are all but independent, and their number is Poisson.
The less of both is stated. It says too little where shared pairs, which guide the reading beside projections,
know more than these. From a hundred chunks on, the first bound alone holds, for .98 and more
of the answers (`recall.jsonl` in the benchmarks' results).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

TOP = 10
CONFIDENCE = 0.95
_FEW = 10  # times as many chunks as are asked for: where fewer are read, what was not is counted too
_LEAST = 1e-3  # probability of having been read below which a chunk says no more
_MOST = 512  # missed chunks that are told apart


@dataclass(frozen=True)
class Recall:
    """With this confidence, at least so many of the `top` chunks of largest influence have been read.

    Attributes
    ----------
    top, at_least : int
    confidence : float
    """

    top: int
    at_least: int
    confidence: float


def counts_others(n_read: int, top: int = TOP) -> bool:
    """Tell whether so few chunks are read that those that are not are counted too."""
    return n_read < _FEW * top


def stated_recall(
    influences: np.ndarray,
    odds: np.ndarray,
    n_chunks: int,
    above: np.ndarray | None = None,
    *,
    top: int = TOP,
    confidence: float = CONFIDENCE,
) -> Recall:
    """State how many of the strongest chunks, read or not, are among those that were read.

    The next one below the top counts as well: that there is a tenth, and no more, is known only because it
    was found.

    Parameters
    ----------
    influences : (t,) float64      of the chunks that were read
    odds : (t,) float64            how likely each was to be read, over the errors of the estimates: 0 … 1
    n_chunks : n                   all there are
    above : (≥ top,) float64       how many of those that were not are to be expected above the strongest that
                                   was read, the second, …; None: unknown. Only looked
                                   at where `counts_others`
    """
    top = min(top, n_chunks)
    if len(influences) >= n_chunks:
        return Recall(top, top, confidence)
    strongest = np.argsort(-influences, kind="stable")[: top + 1]
    missed = np.zeros(_MOST)
    missed[0] = 1.0
    failures = np.arange(_MOST)
    for chance in np.clip(odds[strongest], _LEAST, 1.0):
        missed = np.convolve(missed, chance * (1.0 - chance) ** failures)[:_MOST]
    most = int(np.searchsorted(np.cumsum(missed), confidence))
    stated = max(0, min(len(strongest), top) - most)
    if above is not None and counts_others(len(influences), top):
        # the a-th strongest that was read is one of the top where no more than top − a others are above it
        ranks = np.arange(1, min(top, len(above)) + 1)
        held = _poisson(top - ranks, above[: len(ranks)]) >= confidence
        stated = min(stated, int(ranks[held].max(initial=0)))
    return Recall(top, stated, confidence)


def _poisson(most: np.ndarray, mean: np.ndarray) -> np.ndarray:
    """Return the probability of a Poisson number of that mean to be so small, of each."""
    from scipy.special import pdtr  # takes a tenth of a second to import

    found: np.ndarray = pdtr(most, mean)
    return found
