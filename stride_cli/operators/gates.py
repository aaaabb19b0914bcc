"""Gates of K subsets as a matrix: float32, or a few bits a gate where it is large.

Rows are kept as chunks' projections are: random signs and Hadamard matrices turn them, which changes no
product, and makes their numbers nearly Gaussian and of one size. Each keeps its highest bits. A linear
measurement reads every gate once, so a packed matrix stays in the index's file, mapped.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from stride_cli.operators.projections import bit_planes, random_signs, scan, turned
from stride_cli.randomness import stream

_NUMBERS_AT_ONCE = 1 << 21  # of rows that are turned together


@dataclass(frozen=True)
class PackedGates:
    """A (K, p) matrix: row k, turned, is ``step[k] · Σ_b 2^b t_kb`` with t = ±1.

    Attributes
    ----------
    codes : (K, B, 8 ⌈p / 64⌉) uint8      B bits a gate: whether t_kb is 1, the highest bit of a byte first
    step : (K,) float32
    size : p
    """

    codes: np.ndarray
    step: np.ndarray
    size: int

    def __post_init__(self) -> None:
        expected = (len(self.step), 8 * _words(self.size))
        found = (len(self.codes), *self.codes.shape[2:]), (self.codes.dtype, self.step.dtype)
        if found != (expected, (np.uint8, np.float32)) or self.step.ndim != 1:
            raise ValueError(f"packed gates {self.codes.shape} do not hold {self.size} a subset")

    @classmethod
    def of(cls, gates: np.ndarray, bits: int) -> PackedGates:
        """Round a (K, p) float32 matrix to so many bits a gate, subset by subset."""
        count, size = gates.shape
        codes, step = np.empty((count, bits, 8 * _words(size)), np.uint8), np.empty(count, np.float32)
        for some in _groups(count, size):
            planes, step[some], _ = bit_planes(_turn(gates[some]), bits)
            codes[some] = planes.view(np.uint8)
        return cls(codes, step, size)

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.codes), self.size

    @property
    def nbytes(self) -> int:
        return int(self.codes.nbytes + self.step.nbytes)

    def __len__(self) -> int:
        return len(self.codes)


Gates = np.ndarray | PackedGates


def gate_rows(gates: Gates, rows: np.ndarray | slice) -> np.ndarray:
    """Widen some subsets' gates to (k, p) float32."""
    if not isinstance(gates, PackedGates):
        return np.asarray(gates[rows], dtype=np.float32)
    codes = np.asarray(gates.codes[rows])
    wide = np.zeros((len(codes), 8 * codes.shape[2]), np.float32)
    for plane in range(codes.shape[1]):
        wide += np.float32(1 << plane) * np.unpackbits(codes[:, plane], axis=1)
    wide -= np.float32((1 << codes.shape[1]) - 1) / 2
    wide *= 2 * gates.step[rows, None]
    signs, flips = _signs_of(gates.size)
    turned(wide, flips, back=True)
    wide *= signs
    return wide[:, : gates.size]


def gate_responses(gates: Gates, gradients: np.ndarray) -> np.ndarray:
    """Multiply ``a_k · g_q`` for every subset and query.

    Parameters
    ----------
    gates : (K, p)
    gradients : (Q, p) float32     read as numbers of three bits where gates are packed

    Returns
    -------
    ndarray (Q, K) float32
    """
    if not isinstance(gates, PackedGates):
        found: np.ndarray = (gates @ gradients.T).T
        return found
    responses = np.zeros((len(gradients), len(gates)), np.float32)
    part = np.empty_like(responses)
    for some in _groups(len(gradients), gates.size):
        planes, units, _ = bit_planes(_turn(gradients[some]))
        for bit in range(gates.codes.shape[1]):
            scan(gates.codes[:, bit], gates.step * np.float32(1 << bit), planes, units, part[some])
            responses[some] += part[some]
    return responses


def combined_gates(gates: Gates, weights: np.ndarray) -> np.ndarray:
    """Sum ``Σ_k c_k a_k`` for weights (..., K), (..., p) float32."""
    total = np.zeros((*weights.shape[:-1], gates.shape[1]), np.float32)
    for some in _groups(*gates.shape):
        total += weights[..., some].astype(np.float32) @ gate_rows(gates, some)
    return total


def _groups(count: int, size: int) -> list[slice]:
    """Split rows of p numbers into groups that are turned together."""
    step = max(1, _NUMBERS_AT_ONCE // max(1, size))
    return [slice(start, start + step) for start in range(0, count, step)]


def _words(size: int) -> int:
    """Count the words of 64 bits that hold a bit of each gate."""
    return -(-size // 64)


@lru_cache(maxsize=8)
def _signs_of(size: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw the signs of p gates before they are turned, and between two turns."""
    random = stream(0, "turned gates")
    return random_signs(random, 64 * _words(size)), random_signs(random, 64 * _words(size))


def _turn(rows: np.ndarray) -> np.ndarray:
    """Turn (k, p) float32 to (k, 64 ⌈p / 64⌉)."""
    signs, flips = _signs_of(rows.shape[1])
    wide = np.zeros((len(rows), len(signs)), np.float32)
    np.multiply(rows, signs[: rows.shape[1]], out=wide[:, : rows.shape[1]])
    turned(wide, flips)
    return wide
