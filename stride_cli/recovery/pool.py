"""The inner problem: the Lasso over the columns that a scan collected, by coordinate descent, then Newton
steps."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from stride_cli.recovery import kernels
from stride_cli.recovery.newton import Problem, newton_steps
from stride_cli.recovery.thinning import settle, thin

_PATIENCE = 100  # coordinate rounds on one set of columns before Newton steps are tried
_DESCENT = 0.4  # from one λ to the next on the way down
ROUGH = 1e-3  # share of the objective that the gap may be on the way
_NEAR = 0.9  # share of λ from which on a column's score calls it into Newton steps
_ROUNDS = 10  # coordinate rounds over the support between two looks at the gap


@dataclass(frozen=True)
class Penalty:
    """λ ‖w‖₁, w ≥ 0 where `nonneg`, columns and y centred where `intercept`."""

    lambda_: float
    nonneg: bool
    intercept: bool


@dataclass(frozen=True)
class Certificate:
    """The objective at some w, and a lower bound on the objective at every w."""

    objective: float
    bound: float


class Pool:
    """Collected columns with their weights and residual.

    Identical columns are one variable: M cannot tell them apart, so only the sum of their weights is
    determined. The even split is our choice, for it depends on nothing but the columns themselves.

    Attributes
    ----------
    rows (G, d) distinct columns; weights (G,) float64, their summed w; residual (K,) float64 = y_c − M_c w;
    ids (C,) int64, the collected chunks, and group (C,) int64, the row of each; n_steps, coordinate rounds
    and Newton steps so far
    """

    def __init__(self, target: np.ndarray, degree: int, dtype: np.dtype) -> None:
        self.target = target
        self.residual = target.copy()
        self.rows = np.empty((0, degree), dtype)
        self.ids = np.empty(0, np.int64)
        self.group = np.empty(0, np.int64)
        self.weights = np.empty(0)
        self.multiplicity = np.empty(0)
        self.n_steps = 0
        self._sigma: float | None = None

    def replace(self, ids: np.ndarray, rows: np.ndarray) -> None:
        """Keep the columns with weight, forget the others, take in chunks `ids` (C,), ascending, with `rows`
        (C, d)."""
        per_chunk = self.per_chunk()
        keep = nonzero(per_chunk)
        old_ids, old_rows, old_weights = self.ids[keep], self.rows[self.group[keep]], per_chunk[keep]
        if len(keep):
            fresh = np.ones(len(ids), bool)
            fresh[positions(ids, old_ids)] = False
            ids, rows = np.concatenate([old_ids, ids[fresh]]), np.concatenate([old_rows, rows[fresh]])
        self.ids = ids
        first, self.group = _distinct(rows)
        self.rows = rows if len(first) == len(rows) else rows[first]
        self.multiplicity = np.bincount(self.group, minlength=len(first)).astype(np.float64)
        self.weights = np.zeros(len(first))
        np.add.at(self.weights, self.group[: len(keep)], old_weights)

    def shrink(self) -> None:
        """Forget the columns without weight."""
        kept = self.weights != 0.0
        inside = kept[self.group]
        self.ids, self.group = self.ids[inside], (np.cumsum(kept) - 1)[self.group[inside]]
        self.rows, self.weights = self.rows[kept], self.weights[kept]
        self.multiplicity = self.multiplicity[kept]

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

    def scores(self, penalty: Penalty) -> np.ndarray:
        """(G,) |m_i · r|, signed where nonneg: at the optimum ≤ λ, and = λ where w_i ≠ 0."""
        values = np.empty(len(self.rows))
        kernels.inner_products_kernel(self.rows, self.residual, values)
        return values if penalty.nonneg else np.abs(values)

    def certify(self, penalty: Penalty, largest: float) -> Certificate:
        """The objective, and the dual objective at the best feasible multiple of the residual.

        D(s r) = s y_c·r − ½ s² ‖r‖², feasible while s × (largest score) ≤ λ (Massias, Gramfort and Salmon,
        2018, section 2).
        """
        squares = float(self.residual @ self.residual)
        objective = 0.5 * squares + penalty.lambda_ * float(np.abs(self.weights).sum())
        product = float(self.target @ self.residual)
        return Certificate(objective, _dual(product, squares, penalty.lambda_, largest))

    def _own_certificate(self, penalty: Penalty) -> Certificate:
        """`certify` as if there were no other columns."""
        return self.certify(penalty, float(self.scores(penalty).max(initial=0.0)))

    def minimise(self, penalty: Penalty, goal: float, max_steps: int) -> bool:
        """Optimise over the pool until the duality gap over it is ≤ goal; False when max_steps did not do.

        λ comes down in steps from where the present weights are about optimal: from far away, both methods
        lose their time on columns that have no place in the solution.
        """
        lambda_ = _DESCENT * float(self.scores(penalty).max(initial=0.0))
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
            scores = self.scores(penalty)
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
                self.rows, self.weights, self.residual, penalty.lambda_, penalty.intercept,
                penalty.nonneg, order, n_epochs, threshold,
            )
        )  # fmt: skip

    def thin(self, penalty: Penalty) -> None:
        """Leave no more non-zeros than there are independent columns."""
        support = nonzero(self.weights)
        if len(support) <= len(self.target) - penalty.intercept:
            return
        before = self.weights, self.residual
        objective = self.certify(penalty, np.inf).objective
        self.weights = self.weights.copy()
        self.weights[support] = thin(
            self.rows[support], self.weights[support], len(self.target), centred=penalty.intercept
        )
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
        if certificate.objective - certificate.bound <= goal:
            return False
        support = nonzero(self.weights)
        self.weights = self.weights.copy()
        self.weights[support] = settle(
            self.rows[support], self.weights[support], self.target, penalty.lambda_, centred=penalty.intercept
        )
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
            scores = self.scores(penalty)
            working = np.flatnonzero((self.weights != 0.0) | (scores >= _NEAR * penalty.lambda_))
            part = self.restricted(working)
            part.n_steps = self.n_steps
            dual = part._newton_whole(penalty, 0.5 * goal, max_steps)
            self.n_steps, self._sigma = part.n_steps, part._sigma
            self.weights[working], self.residual = part.weights, part.residual
            bound = max(bound, self._dual_at(dual, penalty))
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
        problem = Problem(self.rows, self.target, penalty.lambda_, penalty.nonneg, penalty.intercept)
        dual = self.residual
        for weights, dual, products, sigma, steps in newton_steps(
            problem, self.weights, self.residual, self._sigma
        ):
            self.n_steps += max(1, steps)
            self.weights = weights
            self.refresh_residual(penalty)
            certificate = self._own_certificate(penalty)
            bound = max(bound, certificate.bound)
            largest = float((products if penalty.nonneg else np.abs(products)).max(initial=0.0))
            bound = max(bound, _dual(*self._products(dual), penalty.lambda_, largest))
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

    def _dual_at(self, dual: np.ndarray, penalty: Penalty) -> float:
        """The dual objective at the best feasible multiple of `dual` (K,)."""
        products = np.empty(len(self.rows))
        kernels.inner_products_kernel(self.rows, dual, products)
        largest = float((products if penalty.nonneg else np.abs(products)).max(initial=0.0))
        return _dual(*self._products(dual), penalty.lambda_, largest)

    def _products(self, dual: np.ndarray) -> tuple[float, float]:
        return float(self.target @ dual), float(dual @ dual)


def _dual(product: float, squares: float, lambda_: float, largest: float) -> float:
    """max_s s·product − ½ s²·squares over 0 ≤ s, s · largest ≤ λ."""
    limit = lambda_ / largest if largest > 0 else np.inf
    scale = min(max(product / squares, 0.0), limit) if squares > 0 else 0.0
    return scale * product - 0.5 * scale * scale * squares


def nonzero(values: np.ndarray) -> np.ndarray:
    """Find values (N,) that are not zero, ascending; np.flatnonzero of numbers takes five times as long."""
    return np.flatnonzero(values != 0.0)


def positions(ascending: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Find those of `wanted` that occur in `ascending` (distinct values)."""
    at = np.searchsorted(ascending, wanted)
    inside = at < len(ascending)
    at, wanted = at[inside], wanted[inside]
    return at[ascending[at] == wanted]


def _distinct(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """First occurrence of each distinct row, and for every row which one it is."""
    hashes = np.empty(len(rows), np.uint64)
    kernels.hash_rows_kernel(rows, hashes)
    ordered = np.sort(hashes)
    if not (ordered[1:] == ordered[:-1]).any():  # nearly always, in a design worth its name
        everything = np.arange(len(rows))
        return everything, everything
    _, first, group = np.unique(hashes, return_index=True, return_inverse=True)
    if (rows[first[group]] != rows).any():  # two different rows with one hash: 1 in 2^64 per pair
        _, first, group = np.unique(rows, axis=0, return_index=True, return_inverse=True)
    return first, group.ravel()
