"""Compiled products of packed gates and of signs, which read each byte once, and gates widened.

A query's responses are y_k = a_k · g_x (linear measurement), a product of the K × p gates with one vector: as
long as memory takes to deliver the gates. So the loops here read each gate once, for several queries, and
multiply the stored integers themselves instead of widening them first.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import intrinsic

from stride_cli.startup import compiled

# of a block whose numbers are all smaller, nothing is kept: its step is the smallest that is not denormal
_LEAST = np.finfo(np.float32).tiny * np.float32(32767)
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
def narrow(wide, values, scale):
    """Round a vector to 16-bit numbers: ``values[j] · scale[j // 256] ≈ wide[j]``; the scale of a block that
    is not finite is NaN.

    Parameters
    ----------
    wide : (p,) float32
    values : (p,) int16, scale : (⌈p / 256⌉,) float32, which are written
    """
    most = np.float32(32767)
    for block in range(len(scale)):
        stop = min(len(wide), block * 256 + 256)
        part, target = wide[block * 256 : stop], values[block * 256 : stop]
        largest = _LEAST
        finite = True
        for j in range(len(part)):
            finite &= np.isfinite(part[j])
            largest = max(largest, abs(part[j]))
        step = largest / most
        scale[block] = step if finite else np.nan
        for j in range(len(part)):
            target[j] = np.int16(np.rint(part[j] / step)) if finite else 0


@compiled
def sign_products(words, step, planes, units, out):
    """``out[q, i] = step[i] · units[q] · Σ_j s_ij Σ_k 2^k t_qjk``, of signs: 1 where a bit is set, else −1.

    The product of two signs is 1 where their bits agree: Σ_j s_j t_j = r − 2 · (bits in which they differ).

    Parameters
    ----------
    words : (n, r / 64) uint64, step : (n,) float32
    planes : (Q, 3, r / 64) uint64, units : (Q,) float32
    out : (Q, n) float32
    """
    count, length = words.shape
    most = np.int64(7 * 64 * length)  # all signs agree: Σ_k 2^k r
    for i in range(count):
        row = words[i]
        # a chunk's signs stay in the cache while all queries' planes pass
        for q in range(len(planes)):
            first, second, third = planes[q, 0], planes[q, 1], planes[q, 2]
            differ = np.int64(0)
            # one sum of all planes: words are counted side by side, and adding these up is most of the work
            for j in range(length):
                differ += (
                    _ones(row[j] ^ first[j])
                    + (_ones(row[j] ^ second[j]) << 1)
                    + (_ones(row[j] ^ third[j]) << 2)
                )
            out[q, i] = step[i] * units[q] * np.float32(most - 2 * differ)


@compiled
def cosines(words, others, table, out):
    """``out[i, j] = table[in how many bits words[i] and others[j] differ]``: of signs, cosines of angles.

    Parameters
    ----------
    words : (t, w) uint64, others : (m, w) uint64
    table : (64 w + 1,) float32
    out : (t, m) float32
    """
    for i in range(words.shape[0]):
        row = words[i]
        for j in range(others.shape[0]):
            other = others[j]
            differ = np.int64(0)
            for k in range(len(row)):
                differ += _ones(row[k] ^ other[k])
            out[i, j] = table[differ]


@intrinsic
def _ones(typing: Any, word: Any) -> Any:
    """Count the bits of a word that are set, by the processor's own instruction."""

    def instruction(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ctpop(arguments[0])

    return types.int64(types.uint64), instruction
