"""The inner problem: the Lasso over the columns that a scan collected, by coordinate descent, then Newton
steps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from stride_cli.recovery import kernels
from stride_cli.recovery.newton import Problem, newton_steps
from stride_cli.recovery.thinning import settle, thin

_PATIENCE = 100  # coordinate rounds on one set of columns before Newton steps are tried
_DESCENT = 0.4  # from one λ to the next on the way down
ROUGH = 1e-3  # share of the objective that the gap may be on the way
_NEAR = 0.9  # share of λ from which on a column's score calls it into Newton steps
_MIX = np.uint64(0x9E3779B97F4A7C15)
_ROUNDS = 10  # coordinate rounds over the support between two looks at the gap


@dataclass(frozen=True)
class Penalty:
    """λ Σ ω_i |w_i|; columns and y are centred where `intercept`."""

    lambda_: float
    intercept: bool


@dataclass(frozen=True)
class Certificate:
    """The objective at some w, and a lower bound on the objective at every w."""

    objective: float
    bound: float


class Terms(NamedTuple):
    """The penalties and bounds of C columns.

    Attributes
    ----------
    omega : (C,) float64 > 0      ω_i
    lowest : (C,) float64 ≤ 0     the least that w_i may be; −∞: anything
    """

    omega: np.ndarray
    lowest: np.ndarray

    def take(self, rows: np.ndarray) -> Terms:
        return Terms(self.omega[rows], self.lowest[rows])


class Pool:
    """Collected columns with their weights and residual.

    Identical columns with one penalty are one variable: M cannot tell them apart, so only the sum of their
    weights is determined. The even split is our choice, for it depends on nothing but the columns themselves.

    Attributes
    ----------
    rows (G, d) distinct columns; terms, their ω and bounds; weights (G,) float64, their summed w;
    residual (K,) float64 = y_c − M_c w; ids (C,) int64, the collected chunks, and group (C,) int64, the row
    of each; n_steps, coordinate rounds and Newton steps so far
    """

    def __init__(self, target: np.ndarray, degree: int, dtype: np.dtype) -> None:
        self.target = target
        self.residual = target.copy()
        self.rows = np.empty((0, degree), dtype)
        self.ids = np.empty(0, np.int64)
        self.group = np.empty(0, np.int64)
        self.weights = np.empty(0)
        self.terms = Terms(np.empty(0), np.empty(0))
        self.multiplicity = np.empty(0)
        self.n_steps = 0
        self._sigma: float | None = None

    def replace(self, ids: np.ndarray, rows: np.ndarray, terms: Terms) -> None:
        """Keep the columns with weight, forget the others, take in chunks `ids` (C,), ascending, with `rows`
        (C, d) and `terms`; bounds are of single chunks, and all chunks of a group have the same."""
        per_chunk = self.per_chunk()
        keep = nonzero(per_chunk)
        old_ids, old_group, old_weights = self.ids[keep], self.group[keep], per_chunk[keep]
        if len(keep):
            fresh = np.ones(len(ids), bool)
            fresh[positions(ids, old_ids)] = False
            ids = np.concatenate([old_ids, ids[fresh]])
            old_terms, terms = self._chunk_terms().take(keep), terms.take(fresh)
            rows = np.concatenate([self.rows[old_group], rows[fresh]])
            terms = Terms(*(np.concatenate(pair) for pair in zip(old_terms, terms, strict=True)))
        self.ids = ids
        first, self.group = _distinct(rows, *terms)
        self.rows = rows if len(first) == len(rows) else rows[first]
        self.multiplicity = np.bincount(self.group, minlength=len(first)).astype(np.float64)
        # a group of m chunks may be lowered by m times as much as each
        self.terms = terms.take(first)._replace(lowest=terms.lowest[first] * self.multiplicity)
        self.weights = np.zeros(len(first))
        np.add.at(self.weights, self.group[: len(keep)], old_weights)

    def _chunk_terms(self) -> Terms:
        """ω and bounds of the collected chunks, one by one."""
        lowest = self.terms.lowest / self.multiplicity
        return Terms(self.terms.omega[self.group], lowest[self.group])

    def shrink(self) -> None:
        """Forget the columns without weight."""
        kept = self.weights != 0.0
        inside = kept[self.group]
        self.ids, self.group = self.ids[inside], (np.cumsum(kept) - 1)[self.group[inside]]
        self.rows, self.weights = self.rows[kept], self.weights[kept]
        self.terms, self.multiplicity = self.terms.take(kept), self.multiplicity[kept]

    def per_chunk(self) -> np.ndarray:
        """(C,) weight of each collected chunk: its column's sum, split evenly."""
        return (self.weights / self.multiplicity)[self.group]

    def refresh_residual(self, penalty: Penalty) -> None:
        """residual = y_c − M_c w from scratch, so that rounding does not pile up over the steps."""
        residual = self.target.copy()
        kernels.subtract_columns_kernel(self.rows, self.weights, residual)
        if penalty.intercept:
            residual -= residual.mean()
        self.residual = residual

    def products(self, vector: np.ndarray) -> np.ndarray:
        """m_i · vector / ω_i, (G,)."""
        values = np.empty(len(self.rows))
        kernels.inner_products_kernel(self.rows, vector, values)
        values /= self.terms.omega
        return values

    def scores(self, vector: np.ndarray | None = None) -> np.ndarray:
        """(G,) |m_i · r| / ω_i: at the optimum ≤ λ, and = λ where w_i ≠ 0. r is the residual, or `vector`.

        Without the absolute value where w_i is as low as it may be: nothing pulls it further down.
        """
        values = self.products(self.residual if vector is None else vector)
        both = (self.terms.lowest < 0.0) & (self.weights > self.terms.lowest)
        return np.where(both, np.abs(values), values)

    def certify(self, penalty: Penalty, largest: float) -> Certificate:
        """The objective, and the dual objective at the best feasible multiple of the residual.

        D(s r) = s y_c·r − ½ s² ‖r‖² − Σ_i p_i, feasible while s × (largest score) ≤ λ (Massias, Gramfort and
        Salmon, 2018, section 2). p_i is 0 but for columns with a bound l_i: |l_i| max(0, −s m_i·r − λ ω_i).
        """
        squares = float(self.residual @ self.residual)
        penalised = float(self.terms.omega @ np.abs(self.weights))
        objective = 0.5 * squares + penalty.lambda_ * penalised
        return Certificate(objective, self._dual(self.residual, penalty.lambda_, largest))

    def _own_certificate(self, penalty: Penalty) -> Certificate:
        """`certify` as if there were no other columns."""
        return self.certify(penalty, float(self.scores().max(initial=0.0)))

    def _dual(self, vector: np.ndarray, lambda_: float, largest: float) -> float:
        """The dual objective at the best feasible multiple of `vector` (K,), `largest` its largest score."""
        product, squares = float(self.target @ vector), float(vector @ vector)
        # columns that are as low as they may be have their part in the slope, where they pull further down
        held = np.flatnonzero((self.weights == self.terms.lowest) & (self.weights < 0.0))
        pull = -self.products(vector)[held] if len(held) else np.empty(0)
        cost = self.terms.lowest[held] * self.terms.omega[held]
        limit = lambda_ / largest if largest > 0 else np.inf
        best = (product + float(cost @ np.maximum(0.0, pull))) / squares if squares > 0 else 0.0
        scale = min(max(best, 0.0), limit)
        beyond = np.maximum(0.0, scale * pull - lambda_)
        return scale * product - 0.5 * scale * scale * squares + float(cost @ beyond)

    def minimise(self, penalty: Penalty, goal: float, max_steps: int) -> bool:
        """Optimise over the pool until the duality gap over it is ≤ goal; False when max_steps did not do.

        λ comes down in steps from where the present weights are about optimal: from far away, both methods
        lose their time on columns that have no place in the solution.
        """
        lambda_ = _DESCENT * float(self.scores().max(initial=0.0))
        while lambda_ > penalty.lambda_:
            step = replace(penalty, lambda_=lambda_)
            rough = max(goal, ROUGH * self.certify(step, np.inf).objective)
            if not self._minimise_at(step, rough, max_steps):
                return False
            lambda_ *= _DESCENT
        return self._minimise_at(penalty, goal, max_steps)

    def _minimise_at(self, penalty: Penalty, goal: float, max_steps: int) -> bool:
        bound = -np.inf
        patience = self.n_steps + _PATIENCE
        while True:
            # 1. The gap over the pool: the best lower bound so far counts, as bounds do not only rise
            scores = self.scores()
            certificate = self.certify(penalty, float(scores.max(initial=0.0)))
            bound = max(bound, certificate.bound)
            if certificate.objective - bound <= goal:
                return True
            if self.n_steps >= max_steps:
                return False
            # 2. Where so many coordinate rounds have not done, Newton steps on all that is near the support
            if self.n_steps >= patience:
                bound = max(bound, self._newton(penalty, goal, max_steps))
                patience = max_steps  # if Newton steps did not do, nothing is left but patience
                continue
            # 3. Else rounds over a working set: what has weight, and at most twice as many worst offenders
            violators = np.flatnonzero((scores > penalty.lambda_) & (self.weights == 0.0))
            room = max(64, 2 * int(np.count_nonzero(self.weights)))
            if len(violators) > room:
                violators = violators[np.argpartition(-scores[violators], room)[:room]]
            working = np.concatenate([nonzero(self.weights), np.sort(violators)])
            self._descend(working, penalty, 0.3 * goal, patience)

    def _descend(self, working: np.ndarray, penalty: Penalty, goal: float, limit: int) -> None:
        """Coordinate descent over `working` until the gap over it is ≤ goal, or n_steps reaches the limit."""
        part = self.restricted(working)
        whole = np.arange(len(working))
        threshold = 1e-2 * penalty.lambda_
        while True:
            # two rounds over all find the support; most rounds are over that alone, which is much shorter
            self.n_steps += part.sweep(penalty, whole, 2, threshold)
            self.n_steps += part.sweep(penalty, nonzero(part.weights), _ROUNDS, threshold)
            # steps that are added to a residual leave rounding in it: made anew before anything is certified
            part.refresh_residual(penalty)
            certificate = part._own_certificate(penalty)
            if certificate.objective - certificate.bound <= goal or self.n_steps >= limit:
                break
            threshold *= 0.3
        self.weights[working] = part.weights
        self.residual = part.residual

    def restricted(self, working: np.ndarray) -> Pool:
        """The columns `working` (W,) alone, at the residual as it stands."""
        part = self.emptied()
        part.rows, part.weights = np.ascontiguousarray(self.rows[working]), self.weights[working]
        part.terms = self.terms.take(working)
        part.residual, part.multiplicity = self.residual, self.multiplicity[working]
        part._sigma = self._sigma
        return part

    def emptied(self) -> Pool:
        """The same problem, no columns collected."""
        return Pool(self.target, self.rows.shape[1], self.rows.dtype)

    def sweep(self, penalty: Penalty, order: np.ndarray, n_epochs: int, threshold: float) -> int:
        """Coordinate rounds over the columns in `order`; see `kernels.descend_kernel`."""
        return int(
            kernels.descend_kernel(
                self.rows, self.weights, self.residual, penalty.lambda_ * self.terms.omega,
                self.terms.lowest, penalty.intercept, order, n_epochs, threshold,
            )
        )  # fmt: skip

    @property
    def held(self) -> np.ndarray:
        """Chunks whose weight is as low as it may be, below zero: int64."""
        return self.ids[((self.weights < 0.0) & (self.weights == self.terms.lowest))[self.group]]

    def thin(self, penalty: Penalty) -> None:
        """Leave no more non-zeros than there are independent columns."""
        support = nonzero(self.weights)
        if len(support) <= len(self.target) - penalty.intercept or len(self.held):
            return
        before = self.weights, self.residual
        objective = self.certify(penalty, np.inf).objective
        self.weights = self.weights.copy()
        self.weights[support] = thin(
            self.rows[support], self.weights[support], self.terms.omega[support], len(self.target),
            centred=penalty.intercept,
        )  # fmt: skip
        self.refresh_residual(penalty)
        if self.certify(penalty, np.inf).objective > objective * (1 + 1e-9):  # rounding got the better of it
            self.weights, self.residual = before

    def settle(self, penalty: Penalty, goal: float) -> bool:
        """If the residual does not prove the gap over the pool ≤ goal, solve for the support's weights;
        whether that changed them for the better.

        Newton steps end as soon as their own dual point proves it; a pass over all columns knows only the
        residual, and would send the problem back again and again.
        """
        before = self.weights, self.residual
        certificate = self._own_certificate(penalty)
        if certificate.objective - certificate.bound <= goal or len(self.held):
            return False
        support = nonzero(self.weights)
        self.weights = self.weights.copy()
        self.weights[support] = settle(
            self.rows[support], self.weights[support], self.target,
            penalty.lambda_ * self.terms.omega[support], centred=penalty.intercept,
        )  # fmt: skip
        self.refresh_residual(penalty)
        settled = self._own_certificate(penalty)
        if settled.objective - settled.bound > certificate.objective - certificate.bound:
            self.weights, self.residual = before
            return False
        return True

    def _newton(self, penalty: Penalty, goal: float, max_steps: int) -> float:
        """Semismooth Newton steps until the gap over the pool is ≤ goal; the best bound found.

        They go over the columns that may come to have weight, whose score is near λ; what the others score is
        looked at once these are done.
        """
        bound, gap = -np.inf, np.inf
        while gap > goal:
            scores = self.scores()
            working = np.flatnonzero((self.weights != 0.0) | (scores >= _NEAR * penalty.lambda_))
            part = self.restricted(working)
            part.n_steps = self.n_steps
            dual = part._newton_whole(penalty, 0.5 * goal, max_steps)
            self.n_steps, self._sigma = part.n_steps, part._sigma
            self.weights[working], self.residual = part.weights, part.residual
            bound = max(bound, self._dual(dual, penalty.lambda_, float(self.scores(dual).max(initial=0.0))))
            certificate = self._own_certificate(penalty)
            if certificate.objective - max(bound, certificate.bound) > goal:
                # the steps crawl: their support is found by now, its weights are not
                self.thin(penalty)
                self.settle(penalty, goal)
                certificate = self._own_certificate(penalty)
            bound = max(bound, certificate.bound)
            gap = certificate.objective - bound
            if self.n_steps >= max_steps:
                break
        return bound

    def _newton_whole(self, penalty: Penalty, goal: float, max_steps: int) -> np.ndarray:
        """The steps over all columns; the method's last dual point (K,), often better than the residual."""
        bound, best, best_weights = -np.inf, np.inf, self.weights
        penalties = penalty.lambda_ * self.terms.omega
        problem = Problem(self.rows, self.target, penalties, self.terms.lowest, penalty.intercept)
        dual = self.residual
        for weights, dual, sigma, steps in newton_steps(problem, self.weights, self.residual, self._sigma):
            self.n_steps += max(1, steps)
            self.weights = weights
            self.refresh_residual(penalty)
            certificate = self._own_certificate(penalty)
            bound = max(bound, certificate.bound)
            bound = max(bound, self._dual(dual, penalty.lambda_, float(self.scores(dual).max(initial=0.0))))
            if certificate.objective < best:
                best, best_weights = certificate.objective, weights
            if best - bound <= goal:
                self._sigma = sigma / 9.0  # where a problem with a few more columns does well to start
                break
            if self.n_steps >= max_steps:
                break
        self.weights = best_weights
        self.refresh_residual(penalty)
        return dual


def nonzero(values: np.ndarray) -> np.ndarray:
    """Find values (N,) that are not zero, ascending; np.flatnonzero of numbers takes five times as long."""
    return np.flatnonzero(values != 0.0)


def positions(ascending: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Find those of `wanted` that occur in `ascending` (distinct values)."""
    at = np.searchsorted(ascending, wanted)
    inside = at < len(ascending)
    at, wanted = at[inside], wanted[inside]
    return at[ascending[at] == wanted]


def _distinct(rows: np.ndarray, *others: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """First occurrence of each distinct row with its numbers in `others` (C,), and which one every row is."""
    hashes = np.empty(len(rows), np.uint64)
    kernels.hash_rows_kernel(rows, hashes)
    ordered = np.sort(hashes)
    if not (ordered[1:] == ordered[:-1]).any():  # nearly always, in a design worth its name
        everything = np.arange(len(rows))
        return everything, everything
    for each in others:
        hashes = hashes * _MIX ^ (np.asarray(each, np.float64) + 0.0).view(np.uint64)  # + 0: −0 is 0
    _, first, group = np.unique(hashes, return_index=True, return_inverse=True)
    # other numbers tell all rows apart; or two different rows have one hash: 1 in 2^64 per pair
    if len(first) == len(rows) or (rows[first[group]] != rows).any():
        everything = np.arange(len(rows))
        return everything, everything
    return first, group.ravel()
