"""Compiled loops of the pass over the corpus: chunks' gate gradients, the sums of subsets, projections.

They save memory traffic, not arithmetic: products that are larger than what is made of them, copies, and
sums that would be fetched again for every chunk.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from stride_cli.startup import compiled


@compiled(fastmath={"contract"})
def add_tokens(values, sign, bucket, out):
    """``out[i, bucket[v]] += sign[v] · values[i, v]``: tokens that share a bucket are added up.

    Parameters
    ----------
    values : (N, V) float32
    sign : (V,) float32, bucket : (V,) int64
    out : (N, c) float32
    """
    for i in range(values.shape[0]):
        own, total = values[i], out[i]
        for v in range(values.shape[1]):
            total[bucket[v]] += sign[v] * own[v]


@compiled(fastmath={"contract"})
def add_pairs(ids, values, start, second, factor, out):
    """``out[b, g] += factor[g] · values[b, t, second[g]]`` for every gate g of the token at t, and every t.

    Parameters
    ----------
    ids : (B, T) int64
    values : (B, T, V) float32
    start : (V + 1,) int64, second : (p,) int64, factor : (p,) float32      of `PairLogitSpace`
    out : (B, p) float32
    """
    for b in range(ids.shape[0]):
        total = out[b]
        for t in range(ids.shape[1]):
            token, own = ids[b, t], values[b, t]
            for gate in range(start[token], start[token + 1]):
                total[gate] += factor[gate] * own[second[gate]]


@compiled(fastmath={"contract"})
def add_stretches(gradients, first, length, starts, signs, out):
    """``out[i, starts[s] + o] += signs[g] · gradients[i, j]`` with g = first + j, the s-th stretch of so many
    gates, and o its place in it; behind the last place comes the first.

    Parameters
    ----------
    gradients : (B, m) float32      gates `first` … of all p
    starts : (⌈p / length⌉,) int64, signs : (p,) float32
    out : (B, r) float32            r ≥ length
    """
    count, places = gradients.shape[1], out.shape[1]
    for i in range(gradients.shape[0]):
        own, total = gradients[i], out[i]
        j = 0
        while j < count:
            gate = first + j
            stretch, offset = gate // length, gate % length
            place = (starts[stretch] + offset) % places
            stop = min(count, j + length - offset, j + places - place)
            target, some, sign = total[place:], own[j:stop], signs[gate:]
            for k in range(stop - j):
                target[k] += sign[k] * some[k]
            j = stop


@compiled(fastmath={"reassoc", "contract"})
def sizes(rows, absolute, square):
    """``absolute[i] = Σ_j |rows[i, j]|`` and ``square[i] = Σ_j rows[i, j]²``: (B, r) float32, r a multiple of
    64, in one pass."""
    for i in range(rows.shape[0]):
        whole, squared = np.float64(0), np.float64(0)
        for first in range(0, rows.shape[1], 64):
            part = rows[i, first : first + 64]
            of_part, squared_part = np.float32(0), np.float32(0)
            for j in range(64):  # a known length, whose sums are made side by side
                of_part += abs(part[j])
                squared_part += part[j] * part[j]
            whole += of_part
            squared += squared_part
        absolute[i], square[i] = whole, squared


def turns(count: int) -> list[tuple[int, int]]:
    """Plan the turns of r numbers, a multiple of 64: of each turn the first and how many, a power of 2. Where
    r is none, those at its end are turned again with what they overlap."""
    length = 1 << (count.bit_length() - 1)
    return [(0, length)] if length == count else [(0, length), (count - length, length)]


@compiled
def turn(rows, start, length):
    """Multiply `length` numbers from `start` on with the Hadamard matrix of that order over its root, in
    place: (B, r) float32, `length` a power of 2 and at least 8.

    Sums and differences of numbers that are 1, 2, 4, … apart. What is at most 2,048 apart is done stretch by
    stretch, in the processor's nearest cache.
    """
    factor = np.float32(1.0 / np.sqrt(np.float64(length)))
    near = min(length, 4096)
    for i in range(rows.shape[0]):
        row = rows[i, start : start + length]
        for first in range(0, length, near):
            part = row[first : first + near]
            for j in range(0, near, 8):
                _turn_eight(part[j : j + 8], factor)
            _turn_apart(part, 8, near)
        _turn_apart(row, near, length)


@njit(nogil=True, inline="always")
def _turn_eight(numbers, factor):
    # all three steps at once: one after the other, each would be a loop over single numbers
    a, b, c, d = numbers[0] * factor, numbers[1] * factor, numbers[2] * factor, numbers[3] * factor
    e, f, g, h = numbers[4] * factor, numbers[5] * factor, numbers[6] * factor, numbers[7] * factor
    a, b, c, d, e, f, g, h = a + b, a - b, c + d, c - d, e + f, e - f, g + h, g - h
    a, b, c, d, e, f, g, h = a + c, b + d, a - c, b - d, e + g, f + h, e - g, f - h
    numbers[0], numbers[1], numbers[2], numbers[3] = a + e, b + f, c + g, d + h
    numbers[4], numbers[5], numbers[6], numbers[7] = a - e, b - f, c - g, d - h


@njit(nogil=True, inline="always")
def _turn_apart(numbers, half, length):
    while half < length:
        for first in range(0, length, 2 * half):
            low, high = numbers[first : first + half], numbers[first + half : first + 2 * half]
            for j in range(half):
                x, y = low[j], high[j]
                low[j], high[j] = x + y, x - y
        half *= 2


@compiled(fastmath={"contract"})
def add_rows(sums, rows, gradients, chunks, share, first, last):
    """``sums[rows[m], j] += share[chunks[m]] · gradients[chunks[m], j]`` for every m, in order, and j from
    `first` to `last` − 1.

    A stretch of all gradients stays in the cache while what it is added to passes, which is all the memory
    that is moved: a sum of whole rows reads its gradient from there each time.

    Parameters
    ----------
    sums : (K, p) float32, which is added to
    rows, chunks : (N,) int64
    gradients : (B, p) float32, share : (B,) float32
    """
    for start in range(first, last, 4096):
        stop = min(last, start + 4096)
        for m in range(len(rows)):
            total, own = sums[rows[m], start:stop], gradients[chunks[m], start:stop]
            weight = share[chunks[m]]
            for j in range(stop - start):
                total[j] += weight * own[j]
