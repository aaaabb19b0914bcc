"""Compiled elementwise passes of a NanoChat training step, each over memory once.

Arrays called *low* hold what matrix products read: float32, or bfloat16 as its bits in uint16. All others are
float32. Sums may be reordered by the compiler, always in the same way.
"""

from __future__ import annotations

import numpy as np
from numba import types
from numba.extending import overload

from stride_cli.startup import compiled

_FAST = {"contract", "reassoc", "nsz", "arcp"}
_LOG2E = np.float32(1.4426950408889634)
# 2**f = Σ c_i f**i, |f| ≤ 1/2: the first terms of exp(f ln 2), to 1e-8
_C1, _C2, _C3, _C4 = (
    np.float32(v) for v in (0.6931471805599453, 0.2402265069591007, 0.05550410866482158, 0.009618129107628477)
)
_C5, _C6, _C7 = (
    np.float32(v) for v in (0.0013333558146428443, 0.00015403530393381608, 1.525273380405984e-05)
)
_ONE, _TWO, _HALF = np.float32(1), np.float32(2), np.float32(0.5)


def widen(value):
    """A low value as float32."""
    return (np.uint32(value) << np.uint32(16)).view(np.float32) if isinstance(value, np.uint16) else value


@overload(widen)
def _widen(value):
    if value == types.uint16:
        return lambda value: np.int32(np.int32(value) << 16).view(np.float32)
    return lambda value: value


def put(array, at, value):
    """array[at] = value, rounded to the nearest bfloat16 (ties to even) where the array holds those."""
    if array.dtype == np.uint16:
        bits = int(np.float32(value).view(np.uint32))
        array[at] = np.uint16((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)
    else:
        array[at] = value


@overload(put)
def _put(array, at, value):
    if array.dtype == types.uint16:

        def narrow(array, at, value):
            bits = np.float32(value).view(np.int32)
            rounded = np.int32(bits + np.int32(0x7FFF) + ((bits >> np.int32(16)) & np.int32(1)))
            array[at] = np.uint16((rounded >> np.int32(16)) & np.int32(0xFFFF))

        return narrow

    def same(array, at, value):
        array[at] = value

    return same


@compiled(fastmath=_FAST, error_model="numpy", boundscheck=False)
def norm_kernel(x, eps, normed, low, inverse):
    """normed (N, d) = x / rms(x), also as low; inverse (N,) = 1 / rms(x)."""
    n, d = x.shape
    for i in range(n):
        row, out, out_low = x[i], normed[i], low[i]
        total = np.float32(0)
        for j in range(d):
            total += row[j] * row[j]
        inv = np.float32(_ONE / np.sqrt(total / np.float32(d) + eps))
        inverse[i] = inv
        for j in range(d):
            value = row[j] * inv
            out[j] = value
            put(out_low, j, value)


@compiled(fastmath=_FAST, error_model="numpy", boundscheck=False)
def norm_back_kernel(upstream, normed, inverse, dx, dx_low):
    """dx (N, d) += the slope before a norm whose output has slope `upstream` (low); dx also as low."""
    n, d = normed.shape
    for i in range(n):
        up, y, out, out_low = upstream[i], normed[i], dx[i], dx_low[i]
        mean = np.float32(0)
        for j in range(d):
            mean += widen(up[j]) * y[j]
        mean = np.float32(mean / np.float32(d))
        inv = inverse[i]
        for j in range(d):
            value = out[j] + inv * (widen(up[j]) - y[j] * mean)
            out[j] = value
            put(out_low, j, value)


@compiled(fastmath=_FAST, error_model="numpy", boundscheck=False)
def turn_kernel(qkv, length, cos, sin, eps, turned, inverse, qk, v):
    """Queries and keys rotated and normed, heads first.

    qkv (N, 3, H, h) low; cos, sin (T, h/2); turned (2, B, H, T, h), inverse (2, B, H, T); qk as turned and v
    (B, H, T, h), low
    """
    n, _, heads, h = qkv.shape
    half = h // 2
    for token in range(n):
        b, t = token // length, token % length
        c, s = cos[t], sin[t]
        for which in range(2):
            for head in range(heads):
                source = qkv[token, which, head]
                out, low = turned[which, b, head, t], qk[which, b, head, t]
                total = np.float32(0)
                for j in range(half):
                    left, right = widen(source[j]), widen(source[half + j])
                    first = left * c[j] + right * s[j]
                    second = right * c[j] - left * s[j]
                    out[j] = first
                    out[half + j] = second
                    total += first * first + second * second
                inv = np.float32(_ONE / np.sqrt(total / np.float32(h) + eps))
                inverse[which, b, head, t] = inv
                for j in range(h):
                    value = out[j] * inv
                    out[j] = value
                    put(low, j, value)
        for head in range(heads):
            source, low = qkv[token, 2, head], v[b, head, t]
            for j in range(h):
                low[j] = source[j]


@compiled(fastmath=_FAST, error_model="numpy", boundscheck=False)
def turn_back_kernel(dq, dk, dv, length, cos, sin, scale, turned, inverse, dqkv):
    """The slope of qkv (N, 3, H, h) from those of scaled queries and keys, and values, (B, H, T, h) low."""
    n, _, heads, h = dqkv.shape
    half = h // 2
    row = np.empty(h, np.float32)
    for token in range(n):
        b, t = token // length, token % length
        c, s = cos[t], sin[t]
        for which in range(2):
            for head in range(heads):
                up = dq[b, head, t] if which == 0 else dk[b, head, t]
                y, out = turned[which, b, head, t], dqkv[token, which, head]
                mean = np.float32(0)
                for j in range(h):
                    value = widen(up[j]) * scale
                    row[j] = value
                    mean += value * y[j]
                mean = np.float32(mean / np.float32(h))
                inv = inverse[which, b, head, t]
                for j in range(half):
                    first = inv * (row[j] - y[j] * mean)
                    second = inv * (row[half + j] - y[half + j] * mean)
                    put(out, j, first * c[j] - second * s[j])
                    put(out, half + j, first * s[j] + second * c[j])
        for head in range(heads):
            up, out = dv[b, head, t], dqkv[token, 2, head]
            for j in range(h):
                out[j] = up[j]


@compiled(fastmath=_FAST, error_model="numpy", boundscheck=False)
def add_kernel(x, change):
    """x (N, d) += change (N, d), low."""
    n, d = x.shape
    for i in range(n):
        row, other = x[i], change[i]
        for j in range(d):
            row[j] += widen(other[j])


@compiled(fastmath=_FAST, error_model="numpy", boundscheck=False)
def square_kernel(active, square):
    """active (N, f) = relu of itself, square = active², low."""
    n, f = active.shape
    for i in range(n):
        row, out = active[i], square[i]
        for j in range(f):
            value = max(widen(row[j]), np.float32(0))
            put(row, j, value)
            put(out, j, value * value)


@compiled(fastmath=_FAST, error_model="numpy", boundscheck=False)
def square_back_kernel(upstream, active):
    """upstream (N, f) = the slope before relu², in place, low."""
    n, f = active.shape
    for i in range(n):
        row, value = upstream[i], active[i]
        for j in range(f):
            put(row, j, _TWO * widen(value[j]) * widen(row[j]))


@compiled(fastmath=_FAST, error_model="numpy", boundscheck=False)
def _exp(x):
    """exp of |x| < 80, to a relative 2e-7; written out so that loops around it become vector code."""
    y = x * _LOG2E
    whole = np.floor(y + _HALF)
    f = y - whole
    p = ((((((_C7 * f + _C6) * f + _C5) * f + _C4) * f + _C3) * f + _C2) * f + _C1) * f + _ONE
    return p * np.int32((np.int32(whole) + np.int32(127)) << np.int32(23)).view(np.float32)


@compiled(fastmath=_FAST, error_model="numpy", boundscheck=False)
def loss_kernel(z, targets, cap, weight):
    """Σ over rows of the cross entropy under a soft cap; z (R, V) low becomes its slope times `weight`.

    Logits lie between ± cap, so their exponentials need no shift.
    """
    n, vocab = z.shape
    exps, tanhs = np.empty(vocab, np.float32), np.empty(vocab, np.float32)
    total = 0.0
    for i in range(n):
        row = z[i]
        norm = np.float32(0)
        for j in range(vocab):
            t = _ONE - _TWO / (_exp(_TWO * min(widen(row[j]) / cap, np.float32(20))) + _ONE)
            p = _exp(cap * t)
            tanhs[j] = t
            exps[j] = p
            norm += p
        factor = np.float32(weight / norm)
        for j in range(vocab):
            t = tanhs[j]
            put(row, j, factor * exps[j] * (_ONE - t * t))
        target = targets[i]
        t = tanhs[target]
        total += np.log(norm) - cap * t
        put(row, target, (factor * exps[target] - weight) * (_ONE - t * t))
    return total
