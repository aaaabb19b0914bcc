"""The design matrix M: the subsets that each chunk belongs to, from a counter-based generator.

Every chunk belongs to exactly ``degree`` of the ``n_subsets`` subsets (left-regular, paper sec. 3.2). The
subsets of chunk i are a function of (seed, i) alone: columns are computed in any order and any block size,
and an index grows without touching what is there.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_LOW_32 = np.uint64(0xFFFFFFFF)

# Compared by value below this degree, through a table of flags above it: the table costs n_subsets bytes a
# chunk, comparing costs degree**2 / 2 operations a chunk.
_TABLE_DEGREE = 48
_TABLE_BYTES = 1 << 26
_BLOCK_CHUNKS = 1 << 14
_BLOCK_ENTRIES = 1 << 18


def build_columns(start: int, stop: int, *, n_subsets: int, degree: int, seed: int) -> np.ndarray:
    """Draw the subsets of chunks ``start … stop-1``.

    For chunk i a SplitMix64 stream, whose start is a hash of (seed, i), drives Floyd's sampling of `degree`
    distinct values out of `n_subsets`: every set of that size is equally likely (up to 2**-32 * n_subsets,
    the rounding of a 32-bit draw to a range).

    Parameters
    ----------
    start, stop : int      chunk numbers, 0 <= start <= stop
    n_subsets : int        K
    degree : int           d, 1 <= d <= K
    seed : int             0 <= seed < 2**64

    Returns
    -------
    ndarray (stop - start, degree)   uint16, or uint32 where n_subsets > 65536; each row ascending, distinct

    Raises
    ------
    ValueError             K < d, or a number outside its range
    """
    _check(start, stop, n_subsets, degree, seed)
    dtype = np.uint16 if n_subsets <= 1 << 16 else np.uint32
    columns = np.empty((stop - start, degree), dtype)
    if degree == n_subsets:
        columns[:] = np.arange(n_subsets, dtype=dtype)
        return columns
    seed_key = _mix(np.array([seed], np.uint64) + _GOLDEN)
    by_table = degree > _TABLE_DEGREE
    block = max(1, min(_BLOCK_CHUNKS, _TABLE_BYTES // n_subsets)) if by_table else _BLOCK_CHUNKS
    sample = _sample_by_table if by_table else _sample_by_comparison
    for low in range(start, stop, block):
        high = min(low + block, stop)
        # two rounds of mixing: neighbouring chunks must not have overlapping streams
        keys = _mix(_mix(np.arange(low, high, dtype=np.uint64) * _GOLDEN + seed_key))  # (B,)
        sample(keys, n_subsets, columns[low - start : high - start])
    return columns


def row_sizes(columns: np.ndarray, n_subsets: int) -> np.ndarray:
    """Count the chunks of each subset: (K,) int64, blockwise over `columns` (n, d)."""
    sizes = np.zeros(n_subsets, np.int64)
    rows = max(1, _BLOCK_ENTRIES // max(1, columns.shape[1]))
    for low in range(0, len(columns), rows):
        sizes += np.bincount(np.asarray(columns[low : low + rows]).ravel(), minlength=n_subsets)
    return sizes


def offsets_of(sizes: np.ndarray) -> np.ndarray:
    """Sum sizes up to offsets: 0 and the running sum, (len + 1,) int64."""
    offsets = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=offsets[1:])
    return offsets


def _check(start: int, stop: int, n_subsets: int, degree: int, seed: int) -> None:
    if degree < 1:
        raise ValueError(f"degree must be at least 1, found {degree}")
    if n_subsets < degree:
        raise ValueError(
            f"a chunk cannot belong to degree={degree} distinct subsets when there are n_subsets={n_subsets}"
        )
    if n_subsets > 1 << 32:
        raise ValueError(f"n_subsets must be at most 2**32, found {n_subsets}")
    if not 0 <= start <= stop:
        raise ValueError(f"expected 0 <= start <= stop, found start={start}, stop={stop}")
    if not 0 <= seed < 1 << 64:
        raise ValueError(f"seed must be in 0 … 2**64-1, found {seed}")


def _mix(x: np.ndarray) -> np.ndarray:
    """Apply SplitMix64's finaliser (Steele, Lea, Flood 2014) in place; arithmetic wraps modulo 2**64."""
    shifted = x >> np.uint64(30)
    x ^= shifted
    x *= _MIX_1
    np.right_shift(x, np.uint64(27), out=shifted)
    x ^= shifted
    x *= _MIX_2
    np.right_shift(x, np.uint64(31), out=shifted)
    x ^= shifted
    return x


def _draws(keys: np.ndarray, n_subsets: int, degree: int) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (j, t) for j = K-d … K-1, with t (B,) uint32 uniform in 0 … j: the draws of Floyd's algorithm.

    A 64-bit word of the stream serves two consecutive draws.
    """
    word = np.empty_like(keys)
    for step in range(degree):
        if step % 2 == 0:
            word = _mix(keys + np.uint64((step // 2 + 1) * int(_GOLDEN) % (1 << 64)))
            bits = word >> np.uint64(32)
        else:
            bits = word & _LOW_32
        bound = n_subsets - degree + step
        bits *= np.uint64(bound + 1)
        bits >>= np.uint64(32)
        yield bound, bits.astype(np.uint32)


def _sample_by_comparison(keys: np.ndarray, n_subsets: int, out: np.ndarray) -> None:
    """Apply Floyd's rule: take t unless it is taken already, then take j (which cannot be)."""
    degree = out.shape[1]
    chosen = np.empty((degree, len(keys)), out.dtype)  # a row per draw keeps every operation contiguous
    for step, (bound, drawn) in enumerate(_draws(keys, n_subsets, degree)):
        value = drawn.astype(out.dtype)
        taken = np.zeros(len(keys), bool)
        for earlier in range(step):
            taken |= chosen[earlier] == value
        value[taken] = bound
        chosen[step] = value
    out[:] = chosen.T
    out.sort(axis=1)


def _sample_by_table(keys: np.ndarray, n_subsets: int, out: np.ndarray) -> None:
    """Sample the sets of `_sample_by_comparison` through a table of flags (B, K)."""
    table = np.zeros((len(keys), n_subsets), bool)
    chunks = np.arange(len(keys))
    for bound, drawn in _draws(keys, n_subsets, out.shape[1]):
        value = np.where(table[chunks, drawn], bound, drawn)
        table[chunks, value] = True
    out[:] = np.nonzero(table)[1].reshape(out.shape)  # row-major, hence ascending
