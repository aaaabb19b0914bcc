"""One query's convex problem on its way from pass to pass, and the solution that it ends with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from stride_cli.errors import NumericalError, UsageError
from stride_cli.recovery.pool import ROUGH, Penalty, Pool, Terms, nonzero
from stride_cli.recovery.screening import Candidates, Design, Scales

if TYPE_CHECKING:
    from stride_cli.recovery.recall import Recall

# columns that a scan collects: more means fewer passes where λ is small, and more to search in each; the
# second number below _SMALL λ_max
_COLLECT, _SMALL = (8_192, 32_768), 0.03
_COLLECT_SUBSETS = 4  # but at least so many times K, which bounds the number of non-zeros
_REACH = 0.25  # λ that a scan may be used for, as a share of the smallest score it collected
_FAR = 1.05  # a λ below the scores of all collected columns by more than this is far from reached
_PASSES = 100
_ROUNDING = 1e-9  # two scores closer than this, relatively, are one score


@dataclass(frozen=True)
class Prior:
    """An estimate of every chunk's weight, without the measurements.

    Attributes
    ----------
    means : (n,) float64        μ, in the unit of y
    spreads : (n,) float64      τ ≥ 0, in the same unit: how uncertain it is; 0: the weight is μ, exactly
    """

    means: np.ndarray
    spreads: np.ndarray


@dataclass(frozen=True)
class Solution:
    """Weights of chunks, and how sure they are.

    Attributes
    ----------
    indices : (nnz,) int64       chunks whose weight is not `average`, ascending
    values : (nnz,) float64      their weights, in the unit of y; chunks in exactly the same subsets, which no
                                 measurement can tell apart, share theirs evenly
    intercept : float            c; 0.0 where none was asked for
    lambda_, lambda_max, lambda_ratio : float   λ used, the smallest λ at which all weights are what was
                                 expected (without a prior: 0), their ratio
    moved : int                  weights that are not what was expected: non-zeros of the Lasso
    duality_gap : float          the objective is at most this much above the minimum over all n chunks
    relative_gap : float         duality_gap / (½‖y − ȳ‖²), or / (½‖y‖²) without an intercept; of y − M μ
                                 where there is a prior
    n_passes : int               times that all n columns were read
    n_epochs : int               coordinate rounds and Newton steps in between
    r_squared : float            share of ‖y − ȳ‖² (or ‖y‖²) that c + M w explains; 0.0 where y is constant
    residual : (K,) float64      y − c − M w
    n_chunks : int               n
    average : float              the weight of all chunks that `indices` leaves out
    exact : (t,) int64           chunks whose weight is an exact value, ascending
    recall : Recall or None      how many of the strongest chunks are among these, where that can be told
    """

    indices: np.ndarray
    values: np.ndarray
    intercept: float
    lambda_: float
    lambda_max: float
    lambda_ratio: float
    duality_gap: float
    relative_gap: float
    n_passes: int
    n_epochs: int
    r_squared: float
    residual: np.ndarray
    n_chunks: int
    moved: int = 0
    average: float = 0.0
    exact: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    recall: Recall | None = None

    @property
    def total(self) -> float:
        """Σ |w| over all chunks."""
        return float(np.abs(self.values).sum()) + abs(self.average) * (self.n_chunks - len(self.indices))


def dense(found: Sequence[Solution], dtype: type = np.float64) -> np.ndarray:
    """Weights of all chunks of several solutions, (Q, n)."""
    weights: np.ndarray = np.empty((len(found), found[0].n_chunks), dtype)
    for row, each in zip(weights, found, strict=True):
        row[:] = each.average
        row[each.indices] = each.values
    return weights


@dataclass(frozen=True)
class LassoSettings:
    """Settings of the Lasso, the same for every query of a batch.

    Attributes
    ----------
    lambda_ratio : λ as a share of λ_max
    intercept : fit b, unpenalised
    nonneg : impose w ≥ 0
    tolerance : largest duality gap over all n chunks, relative to ½‖y − ȳ‖² (½‖y‖² without an intercept)
    max_epochs : coordinate rounds and Newton steps in all

    Raises
    ------
    UsageError      λ ≤ 0, tolerance ≤ 0
    """

    lambda_ratio: float = 0.1
    intercept: bool = True
    nonneg: bool = False
    tolerance: float = 1e-6
    max_epochs: int = 20_000

    def __post_init__(self) -> None:
        if not (self.lambda_ratio > 0 and np.isfinite(self.lambda_ratio)):
            raise UsageError(f"λ / λ_max is {self.lambda_ratio}, and must be a positive number")
        if not self.tolerance > 0:
            raise UsageError(f"the tolerance is {self.tolerance}, and must be positive")


class Problem:
    """One query on its way: what it needs from the next pass, and what it makes of it.

        min_{v, c}  ½‖y − M μ − c − M v‖² + λ Σ_i ω_i |v_i|,     w = μ + v,  ω_i = max τ / τ_i

    A chunk with τ_i = 0 is no variable. With w ≥ 0, v_i ≥ −μ_i (and μ ≥ 0). Without a prior μ = 0 and ω = 1.

    y − M μ is centred and scaled to order 1 by a power of two, which rounds nothing, so that y in nats or
    nano-nats takes the same steps.
    """

    def __init__(
        self, design: Design, y: np.ndarray, settings: LassoSettings, number: int, prior: Prior | None = None
    ) -> None:
        self.design = design
        self.settings = settings
        self.number = number
        # 1. What is expected leaves y; how uncertain it is becomes the penalties, the least of them 1
        self.y, self.prior, self.scales = y, prior, None
        largest = 0.0
        if prior is not None:
            means = np.maximum(prior.means, 0.0) if settings.nonneg else prior.means
            self.prior = Prior(means, prior.spreads)
            y = y - design.sums(means)
            largest = float(prior.spreads.max(initial=0.0))
        # 2. Centred, of order 1
        centred = y - y.mean() if settings.intercept else y.copy()
        spread = float(np.abs(centred).max(initial=0.0))
        if spread <= 8 * np.finfo(float).eps * float(np.abs(y).max(initial=0.0)):
            centred, spread = np.zeros_like(y), 0.0  # constant: what is left is rounding
        self.scale = float(2.0 ** np.round(np.log2(spread))) if spread else 1.0
        centred = centred / self.scale
        if settings.intercept:
            centred -= centred.mean()
        self.half = 0.5 * float(centred @ centred)
        self.pool = Pool(centred, design.degree, design.dtype)
        if prior is not None:
            unit = (prior.spreads / (largest or 1.0)).astype(np.float32)
            lowest = (-means / self.scale).astype(np.float32) if settings.nonneg else np.empty(0, np.float32)
            self.scales = Scales(unit, lowest)
        self.lambda_max: float | None = None
        self._first_scores: np.ndarray | None = None
        self._seen: tuple[np.ndarray, float] | None = None  # residual of the last pass, and what it missed
        self.penalty: Penalty | None = None
        self.n_passes = 0
        self.capacity = 2 * self.wanted
        self.stage = 0.0  # the λ that the pool is optimised for, on the way to penalty.lambda_
        self.done = False
        self.gap = 0.0
        self._bound = -np.inf
        if (
            spread == 0.0
            or (settings.intercept and design.degree == design.n_subsets)
            or design.n_chunks == 0
            or (prior is not None and not largest)
        ):
            self._find_penalty(0.0)  # nothing to explain, or nothing to explain it with

    @property
    def wanted(self) -> int:
        """Columns that the next pass should collect."""
        return max(
            _COLLECT[int(self.settings.lambda_ratio < _SMALL)], _COLLECT_SUBSETS * self.design.n_subsets
        )

    def _sampled(self) -> np.ndarray:
        """Some columns' scores at the residual as it stands; kept until the first pass is over."""
        if self._first_scores is not None:
            return self._first_scores
        scores = self.design.sample_scores(
            self.pool.residual, signed=self.settings.nonneg, scales=self.scales
        )
        if self.n_passes == 0:
            self._first_scores = scores
        return scores

    def scan(self, floor: float, capacity: int) -> Candidates:
        """One pass over all columns at the residual as it stands."""
        signed = self.settings.nonneg
        return self.design.scan(
            self.pool.residual, floor, signed=signed, capacity=capacity, scales=self.scales
        )

    def floor(self) -> float:
        """Score from which on the next pass should collect columns."""
        scores = self._sampled()
        floor = self.design.floor_for(scores, self.wanted)
        if self.lambda_max is None:
            if self.settings.lambda_ratio > 0.5:
                # strong rule (Tibshirani et al., 2012): columns below 2λ − λ_max are most likely out:
                # from λ_max to λ a score rises by no more than λ falls. What it misses, a later pass finds
                floor = max(
                    floor, self.design.floor_for(scores, 1) * min(1.0, 2.0 * self.settings.lambda_ratio - 1.0)
                )
            return floor
        assert self.penalty is not None
        if floor > _FAR * self.penalty.lambda_:
            return floor  # far from the solution: thousands violate optimality, and the worst will do
        # what has weight scores λ up to rounding and is always collected, with all columns identical to it
        return min(floor, self._needed())

    def _needed(self) -> float:
        """Score from which on a pass must miss no column, for the certificate and for columns with twins."""
        assert self.penalty is not None
        active = np.abs(self.pool.products(self.pool.residual)[self.pool.weights != 0.0])
        return min(self.penalty.lambda_, float(active.min(initial=np.inf))) * (1 - _ROUNDING)

    def absorb(self, found: Candidates, floor: float) -> None:
        """Take in one pass over all columns at the residual as it stood."""
        self.n_passes += 1
        self._first_scores = None
        self._seen = self.pool.residual.copy(), found.complete
        if self.lambda_max is None:
            # 1. The first pass tells λ_max, and so λ; w = 0 may be the solution already
            largest = max(0.0, found.largest)
            norm = float(np.sqrt(2 * self.half * self.design.degree))
            self._find_penalty(largest if largest > 1e-14 * norm else 0.0)
            if self.done:
                return
        elif floor <= (needed := self._needed()):
            # 2. A pass that missed nothing that matters may prove the gap over all n columns
            # columns below the floor were not looked at more closely
            reached = self._certify(max(self._largest(found), floor))
            if found.complete > needed:
                self.capacity = min(8 * self.capacity, self.design.n_chunks)
                reached = False  # columns that matter were dropped: look again, with more room
            if reached:
                self._take(found)  # twins of columns with weight come in, and have their part
                self.done = True
                return
        # 3. Else its columns join the pool, which is optimised until the next pass. They say little about a λ
        # far below the scores that the pass saw: stop on the way, look again
        self._take(found)
        self.stage = _REACH * floor
        self._minimise()

    def _largest(self, found: Candidates) -> float:
        """The largest score of a pass, without columns that are as low as they may be."""
        held = self.pool.held
        if not len(held):
            return found.largest
        return float(found.values[~np.isin(found.ids, held)].max(initial=-np.inf))

    def _take(self, found: Candidates) -> None:
        count = len(found.ids)
        terms = Terms(np.ones(count), np.full(count, 0.0 if self.settings.nonneg else -np.inf))
        if self.scales is not None:
            terms = self.scales.terms(found.ids)
        self.pool.replace(found.ids, self.design.rows(found.ids), terms)

    def _find_penalty(self, lambda_max: float) -> None:
        settings = self.settings
        self.lambda_max = lambda_max
        lambda_ = settings.lambda_ratio * lambda_max
        self.penalty = Penalty(lambda_, settings.intercept)
        # w = 0 is optimal, with a gap of zero: y_c · (λ / λ_max) is feasible, and the objective is ½‖y_c‖²
        self.done = lambda_ >= lambda_max

    def _minimise(self) -> None:
        assert self.penalty is not None
        goal = 0.3 * self.settings.tolerance * self.half
        penalty = self.penalty
        if self.stage > penalty.lambda_:
            # 1. On the way to λ the gap may be a share of the objective
            penalty = replace(penalty, lambda_=self.stage)
            goal = max(goal, ROUGH * self.pool.certify(penalty, np.inf).objective)
        if not self.pool.minimise(penalty, goal, self.settings.max_epochs) or self.n_passes >= _PASSES:
            raise NumericalError(
                f"query {self.number}: the Lasso did not reach a relative gap of {self.settings.tolerance:g} "
                f"in {self.pool.n_steps} epochs and {self.n_passes} passes (λ / λ_max = "
                f"{self.settings.lambda_ratio:.3g})",
                fix="use a larger λ, or a larger tolerance",
            )
        # 2. At λ itself: no more non-zeros than needed, then a proof without another pass, if one does
        self.pool.refresh_residual(self.penalty)
        if self.stage <= self.penalty.lambda_:
            self.pool.thin(self.penalty)
            self.done = self._proven()
            if not self.done and self.pool.settle(self.penalty, self.settings.tolerance * self.half):
                self.done = self._proven()

    def _proven(self) -> bool:
        """Try to prove from what the last pass saw that the gap over all n columns is small enough.

        A column that it left out scored less than `complete` at r₀, the residual of that time. Now it scores
        |m · r| / ω ≤ |m · r₀| / ω + |m · (r − r₀)| / ω. As ω ≥ 1, the last term is at most a sum of d entries
        of r − r₀: no more than the d largest ones add up to.

            max_i |m_i · r| / ω_i ≤ max(max over the pool, complete + max |sum of d entries of r − r₀|) = s

        Then multiples of r up to λ / s are feasible in the dual, and its objective there is a lower bound of
        the optimum (`Pool.certify`).
        """
        assert self._seen is not None and self.penalty is not None
        before, complete = self._seen  # r₀ (K,), and the score from which on nothing is missing
        # columns identical to one with weight must be there, to share it: they scored as it did
        scores = self.pool.products(before)
        scores = np.where(self.pool.terms.lowest < 0.0, np.abs(scores), scores)
        active = scores[self.pool.weights != 0.0]
        if (active * (1 - _ROUNDING) < complete).any():
            return False
        largest = float(self.pool.scores().max(initial=0.0))  # of the collected columns, at r
        if complete > -np.inf:  # else all n were collected
            largest = max(
                largest, complete + self._change(self.pool.residual - before) + _ROUNDING * abs(complete)
            )
        return self._certify(largest)

    def _change(self, difference: np.ndarray) -> float:
        """The most that d entries of it add up to, in size unless weights are of one sign.

        Any column is d of the K entries; the d largest are no column of M, perhaps, but none adds up to more.
        """
        degree = self.design.degree
        ordered = np.sort(difference)
        most = float(ordered[-degree:].sum())
        one_sided = self.settings.nonneg and self.scales is None
        return most if one_sided else max(most, -float(ordered[:degree].sum()))

    def _certify(self, largest: float) -> bool:
        """Tell whether the gap is small enough if no column scores above `largest`; keep the best bound."""
        assert self.penalty is not None
        certificate = self.pool.certify(self.penalty, largest)
        self._bound = max(self._bound, certificate.bound)
        self.gap = max(0.0, certificate.objective - self._bound)
        return self.gap <= self.settings.tolerance * self.half

    def rest(self) -> None:
        """Hold no more than the next pass needs."""
        self.pool.shrink()
        self._seen = None

    def forget(self) -> None:
        """Give the collected columns back."""
        self.pool = self.pool.emptied()

    def solution(self) -> Solution:
        """The weights w = μ + v, what they leave of y, and the proof."""
        assert self.penalty is not None and self.lambda_max is not None
        # 1. v: nothing has moved where λ is λ_max or more
        if self.penalty.lambda_ >= self.lambda_max:
            indices, values, residual = np.empty(0, np.int64), np.empty(0), self.pool.target
            self.gap = 0.0
        else:
            weights = self.pool.per_chunk()
            support = np.flatnonzero(weights)
            support = support[np.argsort(self.pool.ids[support])]
            indices, values, residual = self.pool.ids[support], weights[support], self.pool.residual
        values, moved = values * self.scale, len(indices)
        total = float(values.sum())
        # 2. w: with a prior every chunk has one
        if self.prior is not None:
            whole = self.prior.means.copy()
            whole[indices] += values
            if self.settings.nonneg:
                whole = np.maximum(whole, 0.0)  # bounds are float32
            indices, total = nonzero(whole), float(whole.sum())
            values = whole[indices]
        offset = float(self.y.mean() - self.design.degree * total / len(self.y))
        # 3. How much of y the weights explain
        centred = self.y - self.y.mean() if self.settings.intercept else self.y
        power = float(centred @ centred)
        residual = residual * self.scale
        return Solution(
            indices=indices,
            values=values,
            intercept=offset if self.settings.intercept else 0.0,
            lambda_=self.penalty.lambda_ * self.scale,
            lambda_max=self.lambda_max * self.scale,
            lambda_ratio=self.settings.lambda_ratio,
            duality_gap=self.gap * self.scale**2,
            relative_gap=self.gap / self.half if self.half else 0.0,
            n_passes=self.n_passes,
            n_epochs=self.pool.n_steps,
            r_squared=1.0 - float(residual @ residual) / power if self.half and power else 0.0,
            residual=residual,
            n_chunks=self.design.n_chunks,
            moved=moved,
        )
