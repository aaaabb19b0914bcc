"""From a solution with too many non-zeros to one as good on linearly independent columns.

A Lasso over n ≫ K columns always has a solution with at most K non-zeros (Tibshirani, EJS 7, 2013, lemma
14). Newton steps may stop at another one, whose columns are dependent. Along a dependency Σ v_i m_i = 0 the
fit does not change, and ‖w‖₁ changes at a constant rate until a weight reaches zero; going where it does not
grow drops columns one by one: the simplex method's way from a face to a corner, with its tableau.
"""

from __future__ import annotations

import numpy as np
from scipy.linalg import lu, qr, solve_triangular

_LARGEST = 4_096  # subsets up to which dense K × K algebra is cheap enough
_ROUNDING = 1e-10


def thin(
    rows: np.ndarray, weights: np.ndarray, penalties: np.ndarray, n_subsets: int, *, centred: bool
) -> np.ndarray:
    """Weights (S,) with the same fit, the same signs or zero, and no larger penalty, on independent columns.

    Parameters
    ----------
    rows : (S, d)         distinct columns
    weights : (S,)        float64, none of them zero
    penalties : (S,)      of each |w_i|, in any unit
    n_subsets : int       K; above 4,096 the weights come back as they are
    centred : bool        the fit may change by a constant, which an intercept takes up
    """
    if n_subsets > _LARGEST:
        return weights
    order = np.argsort(-np.abs(weights), kind="stable")  # large weights into the basis: fewer pivots
    matrix = np.zeros((n_subsets, len(rows)))
    matrix[rows[order].T, np.arange(len(rows))] = 1.0
    if centred:
        matrix -= rows.shape[1] / n_subsets
        matrix = matrix[:-1]  # minus the sum of the others
    basis, others, tableau = _tableau(matrix)
    if not len(others):
        return weights
    basis, others = order[basis], order[others]
    rank = len(basis)
    weights = weights.copy()
    # column j of the tableau writes m_others[j] in terms of the basis
    for j, other in enumerate(others):
        column = tableau[:, j]
        inside = weights[basis]
        rate = penalties[other] * np.sign(weights[other]) - column @ (penalties[basis] * np.sign(inside))
        # raise (+1) or lower (-1) the weight of `other`: whichever does not increase the penalty
        way = -np.sign(weights[other]) if abs(rate) < _ROUNDING else -np.sign(rate)
        change = -way * column
        blocked = (inside * change < 0) & (np.abs(change) > _ROUNDING)
        steps = np.full(rank, np.inf)
        steps[blocked] = -inside[blocked] / change[blocked]
        first = int(np.argmin(steps)) if rank else 0
        own = abs(weights[other]) if way * weights[other] < 0 else np.inf
        length = min(own, steps.min(initial=np.inf))
        if not np.isfinite(length):
            continue  # rounding: no direction is down, so the weight stays
        weights[basis] = inside + length * change
        weights[other] += length * way
        if own <= length:
            weights[other] = 0.0
            continue
        weights[basis[first]] = 0.0
        basis[first] = other
        pivot = tableau[first, j + 1 :] / column[first]
        tableau[:, j + 1 :] -= np.outer(column, pivot)
        tableau[first, j + 1 :] = pivot
    return weights


def settle(
    rows: np.ndarray, weights: np.ndarray, target: np.ndarray, penalties: np.ndarray, *, centred: bool
) -> np.ndarray:
    """The weights (S,) at which each column scores λ_i, with its sign: m_i · (y − M_S w) = λ_i s_i.

    The objective cannot tell weights apart that differ by the root of its rounding; their residuals it can,
    and the certificate is made from these. `weights` come back as they are where the columns are dependent,
    where a sign would change, or above 4,096 subsets.

    Parameters
    ----------
    rows : (S, d)         distinct columns
    weights : (S,)        float64, none of them zero
    target : (K,)         y_c
    penalties : (S,)      λ_i
    """
    n_subsets = len(target)
    if n_subsets > _LARGEST or not 0 < len(rows) <= n_subsets - centred:
        return weights
    matrix = np.zeros((n_subsets, len(rows)))
    matrix[rows.T, np.arange(len(rows))] = 1.0
    if centred:
        matrix -= rows.shape[1] / n_subsets
    basis, upper = qr(matrix, mode="economic", check_finite=False)
    diagonal = np.abs(np.diag(upper))
    if diagonal.min() <= _ROUNDING * diagonal.max():
        return weights
    signs = np.sign(weights)
    shift = solve_triangular(upper, penalties * signs, trans="T", check_finite=False)
    exact = solve_triangular(upper, basis.T @ target - shift, check_finite=False)
    return exact if (exact * signs > 0).all() else weights


def _tableau(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Independent columns (r,), the other columns (o,), and these in terms of the independent ones (r, o)."""
    count = min(matrix.shape)
    everything = np.arange(matrix.shape[1])
    upper = lu(matrix, permute_l=True, check_finite=False)[1]
    diagonal = np.abs(np.diag(upper))
    if count and diagonal.min() > _ROUNDING * diagonal.max():  # the first columns are independent
        rank, pivots = count, everything
    else:
        _, upper, pivots = qr(matrix, mode="economic", pivoting=True, check_finite=False)
        diagonal = np.abs(np.diag(upper))
        rank = int((diagonal > _ROUNDING * diagonal.max(initial=0.0)).sum())
    tableau = solve_triangular(upper[:rank, :rank], upper[:rank, rank:], check_finite=False)
    return pivots[:rank].copy(), pivots[rank:], tableau
