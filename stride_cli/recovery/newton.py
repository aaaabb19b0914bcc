"""The Lasso by a semismooth Newton augmented Lagrangian method, for small λ where coordinate descent crawls.

    primal   min_w  ½‖y_c − M_c w‖² + Σ_i λ_i |w_i|,   w_i ≥ l_i
    dual     max_r  y_c·r − ½‖r‖² − Σ_i p*(m_i · r)

The dual multipliers of the constraint are w itself. With v = w + σ Mᵀr and x(v) = max(soft(v, σλ_i), l_i), a
step minimises over r

    φ(r) = ½‖r‖² − y_c·r + Σ_i x_i² / 2σ     (of what is at its bound, (v_i − x_i + σλ_i) x_i / σ is added)
    ∇φ = r − (y_c − M_c x)
    ∂²φ ∋ I + σ M_J M_Jᵀ,   J = {i : x_i ≠ 0, x_i > l_i}

by Newton steps (conjugate gradients on K unknowns, |J| d work each), then sets w = x and raises σ. The zeros
of x are exact, and only its support enters the linear algebra. Li, Sun and Toh, SIAM J. Optim. 28(1), 2018.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from stride_cli.recovery import kernels
from stride_cli.startup import compiled

_START, _GROWTH = 3.0, 3.0  # of σ, in units of 1 / ‖m_i‖²
# σ grows after at most so many Newton steps; it falls so much when they do not end
_QUICK, _RETREAT = 10, 10.0
_LARGEST = 1e9  # beyond this σ, products of rounding errors show
_ACCURACY = 1e-2  # by how much the gradient of φ shrinks at each σ
_OUTER, _INNER, _CG, _HALVINGS = 60, 50, 500, 20


@dataclass(frozen=True)
class Problem:
    """rows (G, d), distinct columns; target (K,), y_c, summing to zero where `centred`; penalties (G,), λ_i;
    lowest (G,) ≤ 0, l_i."""

    rows: np.ndarray
    target: np.ndarray
    penalties: np.ndarray
    lowest: np.ndarray
    centred: bool

    def proximal(self, values: np.ndarray, sigma: float) -> np.ndarray:
        """x(v): what the penalty makes of v = w + σ Mᵀr."""
        shrunk = np.maximum(np.abs(values) - sigma * self.penalties, 0.0)
        shrunk *= np.sign(values)
        return np.maximum(shrunk, self.lowest, out=shrunk)

    def envelope(self, values: np.ndarray, x: np.ndarray, sigma: float) -> float:
        """The last term of φ."""
        found = float(x @ x) / (2.0 * sigma)
        held = np.flatnonzero((x < 0.0) & (x == self.lowest))
        if len(held):
            beyond = values[held] - x[held] + sigma * self.penalties[held]
            found += float(beyond @ x[held]) / sigma
        return found


def newton_steps(
    problem: Problem, weights: np.ndarray, residual: np.ndarray, sigma: float | None
) -> Iterator[tuple[np.ndarray, np.ndarray, float, int]]:
    """Yield (weights (G,), dual point r (K,), σ, Newton steps) for each σ in turn.

    It starts from `weights`, `residual` (K,) and, where given, the σ that an earlier, similar problem ended
    with.
    """
    rows, target = problem.rows, problem.target
    degree = rows.shape[1]
    n_subsets = len(target)
    norm = degree - degree * degree / n_subsets if problem.centred else float(degree)
    sigma = _START / norm if sigma is None else sigma
    dual = residual.copy()
    products = np.empty(len(rows))
    kernels.inner_products_kernel(rows, dual, products)
    slopes = np.empty(len(rows))
    tiny = 1e-14 * np.sqrt(target @ target)

    for _ in range(_OUTER):
        stop = tiny
        reached = False
        dual_before, products_before = dual.copy(), products.copy()
        for steps in range(_INNER):
            values = weights + sigma * products
            proposed = problem.proximal(values, sigma)
            # what is at its bound stays there while r moves a little
            support = np.flatnonzero((proposed != 0.0) & (proposed > problem.lowest))
            part = np.ascontiguousarray(rows[support])
            gradient = dual - target
            kernels.subtract_columns_kernel(rows, -proposed, gradient)
            if problem.centred:
                gradient -= gradient.mean()
            size = np.sqrt(gradient @ gradient)
            if steps == 0:
                stop = max(tiny, _ACCURACY * size)
            reached = size <= stop
            if reached:
                break
            direction = np.zeros(n_subsets)
            relative = min(0.1, size / np.sqrt(target @ target))
            conjugate_gradient_kernel(part, sigma, -gradient, relative, _CG, problem.centred, direction)
            kernels.inner_products_kernel(rows, direction, slopes)
            # the first of 1, ½, ¼ … that lowers φ by Armijo's rule; by differences, for near the solution the
            # values themselves agree to all digits
            base, promised = problem.envelope(values, proposed, sigma), float(gradient @ direction)
            linear, square = float((dual - target) @ direction), float(direction @ direction)
            length = 1.0
            for _ in range(_HALVINGS):
                values = weights + sigma * (products + length * slopes)
                envelope = problem.envelope(values, problem.proximal(values, sigma), sigma)
                change = length * linear + 0.5 * length * length * square + envelope - base
                if change <= 1e-4 * length * promised + 1e-14 * abs(base):
                    break
                length *= 0.5
            dual += length * direction
            products += length * slopes
        if not reached:
            # too far to go at this σ: back to where the step began, and go there in smaller ones
            sigma /= _RETREAT
            dual, products = dual_before, products_before
            yield weights, dual, sigma, steps
            continue
        weights = proposed
        yield weights, dual, sigma, steps
        if steps <= _QUICK:
            sigma = min(sigma * _GROWTH, _LARGEST / norm)


@compiled
def conjugate_gradient_kernel(rows, sigma, right, relative, n_steps, centred, solution):
    """Solve (I + σ M_c M_cᵀ) x = right to ‖error‖ ≤ relative · ‖right‖; x in `solution` (zero on
    entry).

    rows (S, d), right (K,), solution (K,); `right` sums to zero where `centred`, and so does x.
    """
    count, degree = rows.shape
    n_subsets = right.shape[0]
    error = right.copy()
    search = right.copy()
    image = np.empty(n_subsets)
    square = 0.0
    for k in range(n_subsets):
        square += error[k] * error[k]
    goal = relative * relative * square
    for step in range(n_steps):
        if square <= goal:
            return step
        for k in range(n_subsets):
            image[k] = search[k]
        total = 0.0
        for i in range(count):
            product = 0.0
            for j in range(degree):
                product += search[rows[i, j]]
            product *= sigma
            total += product
            for j in range(degree):
                image[rows[i, j]] += product
        shift = degree * total / n_subsets if centred else 0.0
        curvature = 0.0
        for k in range(n_subsets):
            image[k] -= shift
            curvature += search[k] * image[k]
        if not curvature > 0.0:  # rounding: nothing more to gain
            return step
        length = square / curvature
        before = square
        square = 0.0
        for k in range(n_subsets):
            solution[k] += length * search[k]
            error[k] -= length * image[k]
            square += error[k] * error[k]
        for k in range(n_subsets):
            search[k] = error[k] + square / before * search[k]
    return n_steps
