"""Derive every random stream from the index's seed, by name."""

from __future__ import annotations

import hashlib

import numpy as np


def stream_key(seed: int, name: str, *numbers: int) -> int:
    """Make a 128-bit key that depends on the seed, the stream's name and any numbers alone."""
    text = "/".join([str(seed), name, *(str(number) for number in numbers)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:16], "little")


def stream(seed: int, name: str, *numbers: int) -> np.random.Generator:
    """Make a counter-based generator for one purpose, for example ``stream(seed, "fisher labels",
    chunk)``."""
    return np.random.Generator(np.random.Philox(key=stream_key(seed, name, *numbers)))


def torch_seed(seed: int, name: str, *numbers: int) -> int:
    """Make a seed for torch's generators, from the same naming."""
    return stream_key(seed, name, *numbers) & (2**63 - 1)
