"""Compiled products of signs, of packed gates and of projections, which read each byte once."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.extending import intrinsic

from stride_cli.startup import compiled


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
