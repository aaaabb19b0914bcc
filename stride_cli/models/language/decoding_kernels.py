"""Compiled steps of `decoding`: one token through a block, and through the head."""

from __future__ import annotations

import numpy as np

from stride_cli.startup import compiled

_SUMS = {"reassoc", "contract"}  # sums in any order, so that several numbers are added at once


@compiled(fastmath=_SUMS)
def normed(x, eps):
    """x / √(mean x² + ε) of (d,) float32."""
    total = np.float32(0)
    for j in range(len(x)):
        total += x[j] * x[j]
    return x * (np.float32(1) / np.sqrt(total / np.float32(len(x)) + eps))


@compiled(fastmath=_SUMS)
def _product(matrix, vector):
    """(n, d) @ (d,), float32."""
    out = np.empty(len(matrix), np.float32)
    for i in range(len(matrix)):
        row = matrix[i]
        total = np.float32(0)
        for j in range(len(vector)):
            total += row[j] * vector[j]
        out[i] = total
    return out


@compiled(fastmath=_SUMS)
def _turned(x, cos, sin, eps):
    """One head's query or key (w,) turned by its position, then normed; in place."""
    half = len(x) // 2
    total = np.float32(0)
    for j in range(half):
        first, second = x[j], x[half + j]
        x[j] = first * cos[j] + second * sin[j]
        x[half + j] = second * cos[j] - first * sin[j]
        total += x[j] * x[j] + x[half + j] * x[half + j]
    factor = np.float32(1) / np.sqrt(total / np.float32(len(x)) + eps)
    for j in range(len(x)):
        x[j] *= factor


@compiled(fastmath=_SUMS)
def block_step(x, weights, cache, turn, place, eps):
    """One token through a block of `own_nanochat.Block`; x (d,) float32 is changed in place.

    Parameters
    ----------
    weights : of queries, keys, values, output (d, d), and of the feed-forward part (f, d), (d, f); float32
    cache : keys and values (H, T, w) float32, of which those at `place` are written
    turn : cos and sin of the position's angles, (w / 2,) float32
    place : the token's position, 0 … T − 1
    """
    wq, wk, wv, wo, up, down = weights
    keys, values = cache
    cos, sin = turn
    heads, width = keys.shape[0], keys.shape[2]
    read = normed(x, eps)
    query, key, value = _product(wq, read), _product(wk, read), _product(wv, read)
    attended = np.zeros(len(x), np.float32)
    scale = np.float32(1) / np.sqrt(np.float32(width))
    scores = np.empty(place + 1, np.float32)
    for head in range(heads):
        part = slice(head * width, (head + 1) * width)
        own = query[part]
        _turned(own, cos, sin, eps)
        _turned(key[part], cos, sin, eps)
        keys[head, place] = key[part]
        values[head, place] = value[part]
        most = np.float32(-np.inf)
        for t in range(place + 1):
            other = keys[head, t]
            score = np.float32(0)
            for j in range(width):
                score += own[j] * other[j]
            scores[t] = score * scale
            most = max(most, scores[t])
        total = np.float32(0)
        for t in range(place + 1):
            scores[t] = np.exp(scores[t] - most)
            total += scores[t]
        target = attended[part]
        for t in range(place + 1):
            share = scores[t] / total
            other = values[head, t]
            for j in range(width):
                target[j] += share * other[j]
    x += _product(wo, attended)
    inner = _product(up, normed(x, eps))
    for j in range(len(inner)):
        positive = max(inner[j], np.float32(0))
        inner[j] = positive * positive
    x += _product(down, inner)


@compiled(fastmath=_SUMS)
def likeliest(head, state, cap):
    """The token with the largest logit, and by how much it is ahead of every other; of a logit that is not
    finite, a lead that is no number.

    Parameters
    ----------
    head : (V, d) float32
    state : (d,) float32, normed
    cap : of the logits, c tanh(z / c); 0 for none
    """
    logits = _product(head, state)
    best, first, second = 0, np.float32(-np.inf), np.float32(-np.inf)
    finite = True
    for token in range(len(logits)):
        value = logits[token]
        finite &= np.isfinite(value)
        if value > first:
            best, first, second = token, value, first
        elif value > second:
            second = value
    if cap > 0:
        first, second = cap * np.tanh(first / cap), cap * np.tanh(second / cap)
    return best, first - second if finite else np.float32(np.nan)
