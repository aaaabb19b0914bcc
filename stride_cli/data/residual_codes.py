"""Residuals of tokens, 1 − p, in a byte each: eighths of halvings."""

from __future__ import annotations

import numpy as np

BEFORE = "operators/before"  # of each token of the corpus, by the model before it was trained on it
_STEPS = 8  # of each halving
_LEAST = 1e-12


def packed(residuals: np.ndarray) -> np.ndarray:
    """Residuals, 0 … 1, as uint8; 2^(−255/8) at the least."""
    halvings = -_STEPS * np.log2(np.maximum(residuals, _LEAST))
    return np.clip(np.rint(halvings), 0, 255).astype(np.uint8)


def unpacked(codes: np.ndarray) -> np.ndarray:
    """The inverse of `packed`, float32, to 4.5 %."""
    return np.exp2(codes.astype(np.float32) / -_STEPS)
