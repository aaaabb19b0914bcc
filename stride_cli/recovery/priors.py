"""What overlap with a query adds to influences, in their unit and kept apart from them."""

from __future__ import annotations

import numpy as np

LEAST_TRUST = 0.05  # below, influences do not take part in the ranking to speak of


def prior_parts(
    weights: np.ndarray, similarity: np.ndarray, share: float, trust: np.ndarray | float = 1.0
) -> np.ndarray:
    """What the prior adds to each chunk's influence, in the unit of the weights.

        part_i = share / trust · sd(w) / sd(s) · s_i,     0 where w_i < 0: what opposes is left as it is

    Parameters
    ----------
    weights, similarity : (..., n)      of the same queries
    share : float                       spread of the prior over chunks as a share of the influences' spread
    trust : (...,) or float             `stride_cli.recovery.refinement.trust`: where the subsets are too few
                                        to tell much, the prior decides

    Returns
    -------
    ndarray (..., n) float64 ≥ 0; all 0 where either side is constant over the chunks
    """
    weights = np.asarray(weights, np.float64)
    similarity = np.asarray(similarity, np.float64)
    spread = similarity.std(axis=-1, keepdims=True)
    wanted = share / np.maximum(np.asarray(trust, np.float64)[..., None], LEAST_TRUST)
    scale = np.divide(
        wanted * weights.std(axis=-1, keepdims=True), spread, out=np.zeros_like(spread), where=spread > 0
    )
    return np.where(weights < 0.0, 0.0, scale * similarity)
