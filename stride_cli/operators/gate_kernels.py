"""Compiled product of packed gates with one gradient, which reads each byte once, and their widening."""

from __future__ import annotations

import numpy as np
from numba import njit


@njit(cache=True, nogil=True, fastmath=True)
def packed_product(values: np.ndarray, scale: np.ndarray, gradient: np.ndarray, out: np.ndarray) -> None:
    """``out[k] = Σ_j values[k, j] · scale[k, j // 256] · gradient[j]``.

    Parameters
    ----------
    values : (K, p) int8, scale : (K, ⌈p / 256⌉) float32, gradient : (p,) float32, out : (K,) float32
    """
    count, size = values.shape
    whole = size // 256
    for k in range(count):
        row = values[k]
        total = 0.0
        for block in range(whole):
            # slices of a fixed length: the inner loop is vectorised without a remainder
            part, numbers = row[block * 256 : block * 256 + 256], gradient[block * 256 : block * 256 + 256]
            inner = np.float32(0.0)
            for j in range(256):
                inner += np.float32(part[j]) * numbers[j]
            total += np.float64(inner) * scale[k, block]
        if whole * 256 < size:
            inner = np.float32(0.0)
            for j in range(whole * 256, size):
                inner += np.float32(row[j]) * gradient[j]
            total += np.float64(inner) * scale[k, whole]
        out[k] = np.float32(total)


@njit(cache=True, nogil=True)
def widen(values: np.ndarray, scale: np.ndarray, out: np.ndarray) -> None:
    """``out[k, j] = values[k, j] · scale[k, j // 256]``, (k, p) float32."""
    count, size = values.shape
    for k in range(count):
        for block in range(scale.shape[1]):
            stop = min(size, block * 256 + 256)
            part, target = values[k, block * 256 : stop], out[k, block * 256 : stop]
            factor = scale[k, block]
            for j in range(len(part)):
                target[j] = np.float32(part[j]) * factor
