"""Condition estimates of chunks on the subsets' responses.

Projections and exact gradients give each chunk's influence, up to an error. The K responses give the sums
over the chunks of each subset, all but exactly. With Gaussian errors of known sizes,

    w ~ N(μ, T),   T = diag(τ²),      y = M w + c + e,   e ~ N(0, σ² I),

    E[w | y] = μ + T Mᵀ z,      (M T Mᵀ + σ² I) z = y − M μ − c,      Σ_k z_k = 0

(Gaussian conditioning, or kriging; nothing is known of the constant c beforehand, so that z adds up to 0).
The part of the responses that estimates leave goes to the chunks that are known least. Sums over large sets
of chunks gain most: errors of single chunks that projections leave add up, those that the responses leave do
not.

The system has K unknowns, and is solved by conjugate gradients, each step of which passes over the design
twice.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from stride_cli.recovery.screening import Design

# of more chunks a subset the responses say next to nothing (they know K of n directions); and of how many it
# is worth the time
_MOST_A_SUBSET, _MOST = 64, 1 << 18
_STEPS, _EXACT = 200, 1e-6  # of conjugate gradients, at most, and what is left of the right side
# of a response: shares of what is not known of it, so that the system is well-conditioned, and of the
# response, as operators are stored in eight bits (1e-6 to 8e-5 of it are no sums of influences)
_LEAST_NOISE, _ROUNDED = 1e-3, 1e-4


def tell(n_chunks: int, n_subsets: int) -> bool:
    """Tell whether so many subsets say enough of single chunks to be asked."""
    return n_chunks <= min(_MOST, _MOST_A_SUBSET * n_subsets)


def corrections(
    columns: Any,
    response: np.ndarray,
    means: np.ndarray,
    variances: np.ndarray,
    *,
    exact: bool,
    intercept: bool,
) -> np.ndarray:
    """E[w | y] − μ, (n,) float64.

    Parameters
    ----------
    columns : (n, d) integers      the subsets that hold each chunk
    response : (K,) float64        y, on the scale of subset sums
    means, variances : (n,) float64      μ, and τ², 0 of what is known exactly
    exact : bool                   whether y is M w; else what is left of y is noise as far as the variances
                                   do not explain it
    intercept : bool               whether there is a constant c
    """
    system = _System(Design(columns, len(response)), variances)
    response = np.asarray(response, np.float64)
    left = response - system.sums(means)
    if intercept:
        left = left - left.mean()
    noise = max(_LEAST_NOISE * float(system.diagonal.mean()), _ROUNDED * float(response.var()))
    if not (noise > 0 and system.diagonal.any()):  # all is known
        return np.zeros(len(means))
    if not exact:
        noise = max(noise, float(np.square(left).mean() - system.diagonal.mean()))
    z = system.solve(left, noise)
    if intercept:
        even = system.solve(np.ones(len(left)), noise)
        z = z - even * (z.sum() / even.sum())
    return system.spread(z)


class _System:
    """M T Mᵀ, by its products."""

    def __init__(self, design: Design, variances: np.ndarray) -> None:
        self._variances, self._count = variances, design.n_subsets
        self._rows = design.rows(np.arange(design.n_chunks))
        self.diagonal = self.sums(variances)  # a chunk is in a subset once

    def sums(self, values: np.ndarray) -> np.ndarray:
        """M v, (K,)."""
        from stride_cli.recovery.kernels import subtract_columns_kernel

        found = np.zeros(self._count)
        subtract_columns_kernel(self._rows, -np.asarray(values, np.float64), found)
        return found

    def spread(self, z: np.ndarray) -> np.ndarray:
        """T Mᵀ z, (n,)."""
        from stride_cli.recovery.kernels import inner_products_kernel

        found = np.empty(len(self._rows))
        inner_products_kernel(self._rows, z, found)
        return self._variances * found

    def solve(self, right: np.ndarray, noise: float) -> np.ndarray:
        """z with (M T Mᵀ + σ² I) z = right: conjugate gradients, each subset's own variance divided out."""
        scale = 1.0 / (self.diagonal + noise)
        z, left = np.zeros(len(right)), right.copy()
        ahead = step = scale * left
        size = float(left @ ahead)
        wanted = _EXACT**2 * float(right @ right)
        for _ in range(_STEPS):
            if not float(left @ left) > wanted:
                break
            image = self.sums(self.spread(step)) + noise * step
            length = size / float(step @ image)
            z = z + length * step
            left = left - length * image
            ahead = scale * left
            size, before = float(left @ ahead), size
            step = ahead + (size / before) * step
        return z
