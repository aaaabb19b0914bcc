"""Posterior means of values that are estimated with errors of known size (empirical Bayes).

Each chunk has an estimate with an error of its own, Gaussian and of known size. In units of that error, true
values come from a mixture of normals of one centre and many widths. It is learnt from the estimates
themselves (adaptive shrinkage: Stephens, Biostatistics 18, 2017). The posterior mean is then a monotone
function of one number. It leaves large values nearly as they are and takes nearly all of small ones away:
those would add up to noise.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

_WIDTHS = 24  # of the mixture's normals, beside 0
_CELLS = 512  # of the histogram that it is learnt from
_ROUNDS = 150
_LEAST_WIDTH = 0.1  # in units of the error: narrower cannot be told from 0


@dataclass(frozen=True)
class Posterior:
    """The mean of a true value, given its estimate; all in units of the estimate's error.

    Attributes
    ----------
    centre : float          of the mixture
    at, mean, variance : (c,) float64      estimates less the centre, ascending, and of what they can be the
        means, also less the centre, and variances
    widths, shares : the mixture's standard deviations, ascending from 0, and weights, which add up to 1
    """

    centre: float
    at: np.ndarray
    mean: np.ndarray
    variance: np.ndarray
    widths: np.ndarray
    shares: np.ndarray

    @classmethod
    def learnt(cls, estimates: np.ndarray) -> Posterior:
        """From estimates (n,) in units of their errors, those of all chunks or of a random sample."""
        values = np.asarray(estimates, np.float64)
        centre = float(values.mean()) if len(values) else 0.0
        away = values - centre
        furthest = float(np.abs(away).max(initial=0.0))
        reach = furthest if furthest > 1e-100 else 1.0  # of numbers next to zero cells have no width
        middles = np.linspace(-reach, reach, _CELLS + 1)
        cells = _shared_out(away, reach)
        widest = max(2.0 * _LEAST_WIDTH, 1.5 * np.sqrt(max(reach**2 - 1.0, 0.0)))
        widths = np.concatenate([[0.0], np.geomspace(_LEAST_WIDTH, widest, _WIDTHS)])
        variance = np.square(widths) + 1.0
        # of each cell the density under each normal, all times one number
        logs = -0.5 * np.square(middles)[:, None] / variance - 0.5 * np.log(variance)
        density = np.exp(logs - logs.max(axis=1, keepdims=True))
        shares = _mixture(density, cells)
        parts = density * shares
        parts /= parts.sum(axis=1, keepdims=True)
        of_each = np.square(widths) / variance  # what each normal keeps of an estimate, and its variance then
        kept = parts @ of_each
        left = parts @ of_each + np.square(middles) * (parts @ np.square(of_each) - np.square(kept))
        return cls(centre, middles, kept * middles, np.maximum(left, 0.0), widths, shares)

    def __call__(self, estimates: np.ndarray) -> np.ndarray:
        """The means (n,) of what these can be; beyond those that it was learnt from, as at the outermost."""
        away = np.asarray(estimates, np.float64) - self.centre
        found = np.interp(away, self.at, self.mean)
        beyond = np.abs(away) > self.at[-1]
        found[beyond] = away[beyond] * (self.mean[-1] / self.at[-1])
        return self.centre + found

    def variances(self, estimates: np.ndarray) -> np.ndarray:
        """The variances (n,) of what these can be."""
        return np.interp(np.asarray(estimates, np.float64) - self.centre, self.at, self.variance)

    def above(self, estimates: np.ndarray, thresholds: np.ndarray) -> np.ndarray:
        """Return the probability of each true value above its threshold, (n,): both in units of the error."""
        from scipy.special import ndtr  # takes a tenth of a second to import

        away = np.asarray(estimates, np.float64)[:, None] - self.centre
        wanted = np.asarray(thresholds, np.float64)[:, None] - self.centre
        variance = np.square(self.widths) + 1.0
        with np.errstate(divide="ignore"):
            logs = np.log(self.shares) - 0.5 * np.square(away) / variance - 0.5 * np.log(variance)
        parts = np.exp(logs - logs.max(axis=1, keepdims=True))
        # of each normal: what is left of the estimate, and the spread around it
        kept = np.square(self.widths) / variance
        spread = np.sqrt(kept)
        over = away * kept - wanted
        certain = np.where(over > 0, np.inf, -np.inf)
        chances = ndtr(np.divide(over, spread, out=certain, where=np.broadcast_to(spread > 0, over.shape)))
        found: np.ndarray = (parts * chances).sum(axis=1) / parts.sum(axis=1)
        return found


def _shared_out(values: np.ndarray, reach: float) -> np.ndarray:
    """Weigh the places between −reach and reach, (c + 1,): a value counts at both places
    beside it, by how near it is, so that rounding moves next to nothing."""
    places = (values + reach) * (_CELLS / (2.0 * reach))
    low = np.clip(np.floor(places).astype(np.int64), 0, _CELLS - 1)
    above = places - low
    found = np.bincount(low, 1.0 - above, minlength=_CELLS + 1)
    found += np.bincount(low + 1, above, minlength=_CELLS + 1)
    return found


def _mixture(density: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The weights (m,) of a mixture that make cells with these counts (c,) likeliest, by expectation and
    maximisation; density (c, m)."""
    counts = counts / max(1.0, float(counts.sum()))
    shares = np.full(density.shape[1], 1.0 / density.shape[1])
    for _ in range(_ROUNDS):
        # of each cell the parts that come from each normal, added up over cells
        whole = density @ shares
        new = shares * (density.T @ np.divide(counts, whole, out=np.zeros_like(whole), where=whole > 0))
        total = new.sum()
        if not total > 0:
            break
        new /= total
        shares = new
    return shares
