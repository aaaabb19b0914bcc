"""From mean responses of subsets to the measurement that the additive model explains."""

from __future__ import annotations

import numpy as np


def additive_measurement(responses: np.ndarray, row_sizes: np.ndarray) -> np.ndarray:
    """Responses on the scale of subset sums, so that y ≈ M w holds row by row.

    An operator fitted on the *mean* gradient of its subset answers with the mean of its chunks' influences,
    ``ȳ_k = (1/|A_k|) Σ_{i∈A_k} s_i``, whereas eq:linsys asks for a sum. Rows of a left-regular design
    differ in size; scaling the centred responses by ``|A_k| / mean size`` makes them sums again:

        y_k = |A_k| / m̄ · (ȳ_k − ȳ),     w_i = (s_i − s̄) / m̄

    Parameters
    ----------
    responses : (..., K) float64, or (..., C K) of C designs one after the other, each treated by itself
    row_sizes : (K,) or (C, K)      |A_k|

    Returns
    -------
    ndarray like `responses`, float64; equal to the centred responses where all rows have the same size
    """
    sizes = np.asarray(row_sizes, dtype=np.float64)
    if sizes.ndim == 2:
        parts = np.split(np.asarray(responses), len(sizes), axis=-1)
        each = [additive_measurement(part, own) for part, own in zip(parts, sizes, strict=True)]
        return np.concatenate(each, axis=-1)
    if sizes.sum() == 0:
        return np.asarray(responses, dtype=np.float64)
    mean = (responses * sizes).sum(axis=-1, keepdims=True) / sizes.sum()
    return (responses - mean) * (sizes / sizes.mean())
