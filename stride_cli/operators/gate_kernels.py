"""Compiled products of packed gates and of sketches, which read each byte once, and gates widened.

A query's responses are y_k = a_k · g_x (linear measurement), a product of the K × p gates with one vector: as
long as memory takes to deliver the gates. So the loops here read each gate once, for several queries, and
multiply the stored integers themselves instead of widening them first.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from stride_cli.startup import compiled

_TOGETHER = 4  # rows read at once: as many streams from memory, for each load of a gradient


@compiled
def packed_product(values, scale, gradients, steps, out):
    """``out[k, q] = Σ_j values[k, j] · scale[k, j // 256] · gradients[q, j] · steps[q, j // 256]``.

    Parameters
    ----------
    values : (K, p) int8, scale : (K, ⌈p / 256⌉) float32
    gradients : (Q, p) int16, steps : (Q, ⌈p / 256⌉) float32
    out : (K, Q) float64
    """
    count, size = values.shape
    sums = np.empty((len(gradients), _TOGETHER))  # of the rows at hand, (Q, 4) float64
    # rows four by four, along them block by block (256 gates, one scale): a block of all queries' gradients
    # stays in the cache while four rows' gates pass
    for first in range(0, count, _TOGETHER):
        sums[:] = 0
        for block in range(scale.shape[1]):
            start = block * 256
            stop = min(size, start + 256)
            for q in range(len(gradients)):
                step = np.float64(steps[q, block])
                numbers = gradients[q, start:stop]
                for row in range(_TOGETHER):
                    k = min(first + row, count - 1)  # behind the end: the last row again
                    part = values[k, start:stop]
                    # a known length makes multiply-add instructions of it
                    if stop - start == 256:
                        found = _product(part, numbers, 256)
                    else:
                        found = _product(part, numbers, stop - start)
                    # Σ_j of integers, exact; the two scales of the block once for all 256
                    sums[q, row] += step * scale[k, block] * found
        for q in range(len(gradients)):
            for row in range(_TOGETHER):
                out[min(first + row, count - 1), q] = sums[q, row]


@njit(nogil=True, inline="always")
def _product(part, numbers, length):
    # 256 products of at most 127 · 32767 add up to less than 2^30: within 32 bits, which is narrow enough for
    # those instructions
    total = np.int32(0)
    for j in range(length):
        total = np.int32(total + np.int32(np.int32(part[j]) * np.int32(numbers[j])))
    return total


@compiled
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


@compiled
def table_sums(codes: np.ndarray, table: np.ndarray, out: np.ndarray) -> None:
    """``out[i] = Σ_j table[j, codes[i, j]]``: (n, b) uint8, (b, 256) float32 → (n,) float32.

    A chunk's m = 8 b signs against a query's m numbers v, Σ_j ± v_j: byte j has one of 256 patterns of eight
    signs, and what its eight numbers add up to under each was written down before (`Sketches.products`).
    """
    for i in range(codes.shape[0]):
        total = np.float32(0)
        for j in range(codes.shape[1]):
            total += table[j, codes[i, j]]
        out[i] = total
