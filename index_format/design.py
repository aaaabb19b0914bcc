"""The design matrix M: which subsets each chunk belongs to, from a counter-based generator.

Every chunk belongs to exactly ``degree`` of the ``n_subsets`` subsets (left-regular, paper sec. 3.2). The
subsets of chunk i are a function of (seed, i) alone: columns are computed in any order and any block size,
and an index grows without touching what is there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

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


class Columns(Protocol):
    """(n, degree) subset ids: an array, a memory map, or a ShardedArray; read by slices of rows."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    def __len__(self) -> int: ...
    def __getitem__(self, rows: slice, /) -> np.ndarray: ...


def build_columns(start: int, stop: int, *, n_subsets: int, degree: int, seed: int) -> np.ndarray:
    """The subsets of chunks ``start … stop-1``.

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


def row_sizes(columns: Columns, n_subsets: int) -> np.ndarray:
    """How many chunks each subset holds: (K,) int64, blockwise over `columns` (n, d)."""
    sizes = np.zeros(n_subsets, np.int64)
    for _, block in _blocks(columns):
        sizes += np.bincount(block.ravel(), minlength=n_subsets)
    return sizes


def build_rows(columns: Columns, n_subsets: int) -> tuple[np.ndarray, np.ndarray]:
    """The transpose of `columns`: the members of every subset.

    Parameters
    ----------
    columns : (n, d) uint16 or uint32
    n_subsets : int        K

    Returns
    -------
    row_offsets : ndarray (K + 1,) int64
    row_members : ndarray (n * d,) uint32, or uint64 where n > 2**32
        Subset k holds chunks ``row_members[row_offsets[k] : row_offsets[k + 1]]``, ascending.
    """
    sizes = row_sizes(columns, n_subsets)
    members = np.empty(int(sizes.sum()), member_dtype(len(columns)))
    _fill_rows(columns, 0, n_subsets, sizes, members)
    return offsets_of(sizes), members


def iter_row_members(
    columns: Columns, sizes: np.ndarray, *, max_members: int = 1 << 23
) -> Iterator[np.ndarray]:
    """``row_members`` in consecutive pieces, for a corpus whose transpose does not fit in memory.

    One pass over `columns` for each piece. `sizes` (K,) is `row_sizes(columns, K)`; a piece is whole subsets,
    at most `max_members` members (or one subset, where that alone is larger).
    """
    offsets = offsets_of(sizes)
    first = 0
    while first < len(sizes):
        last = int(np.searchsorted(offsets, offsets[first] + max_members, side="right")) - 1
        last = min(max(last, first + 1), len(sizes))
        piece = np.empty(int(offsets[last] - offsets[first]), member_dtype(len(columns)))
        _fill_rows(columns, first, last, sizes, piece)
        yield piece
        first = last


def offsets_of(sizes: np.ndarray) -> np.ndarray:
    """0 and the running sum: (len + 1,) int64."""
    offsets = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=offsets[1:])
    return offsets


def member_dtype(n_chunks: int) -> np.dtype:
    """The dtype of row_members: uint32 up to 2**32 chunks, uint64 above."""
    return np.dtype(np.uint32 if n_chunks <= 1 << 32 else np.uint64)


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
    """SplitMix64's finaliser (Steele, Lea, Flood 2014), in place; arithmetic wraps modulo 2**64."""
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
    """(j, t) for j = K-d … K-1, with t (B,) uint32 uniform in 0 … j: the draws of Floyd's algorithm.

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
    """Floyd: take t unless it is taken already, then take j (which cannot be)."""
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
    """The same sets as `_sample_by_comparison`, through a table of flags (B, K)."""
    table = np.zeros((len(keys), n_subsets), bool)
    chunks = np.arange(len(keys))
    for bound, drawn in _draws(keys, n_subsets, out.shape[1]):
        value = np.where(table[chunks, drawn], bound, drawn)
        table[chunks, value] = True
    out[:] = np.nonzero(table)[1].reshape(out.shape)  # row-major, hence ascending


def _blocks(columns: Columns, entries: int = 1 << 20) -> Iterator[tuple[int, np.ndarray]]:
    """(first chunk, block of rows) over all of `columns`."""
    rows = max(1, entries // max(1, columns.shape[1]))
    for low in range(0, len(columns), rows):
        yield low, np.asarray(columns[low : low + rows])


def _fill_rows(columns: Columns, first: int, last: int, sizes: np.ndarray, members: np.ndarray) -> None:
    """Write the members of subsets first … last-1, in order, into `members`."""
    cursor = offsets_of(sizes[first:last])[:-1]  # where the next member of each subset goes
    whole = first == 0 and last == len(sizes)
    degree = columns.shape[1]
    for low, block in _blocks(columns):
        subsets = block.ravel()
        chunks = np.arange(low, low + len(block), dtype=members.dtype).repeat(degree)
        if not whole:
            inside = (subsets >= first) & (subsets < last)
            subsets, chunks = subsets[inside], chunks[inside]
        subsets = subsets - first if first else subsets
        order = np.argsort(subsets, kind="stable")  # stable: members stay ascending
        counts = np.bincount(subsets, minlength=last - first)
        begins = offsets_of(counts)[:-1]
        positions = np.arange(len(order)) + (cursor - begins).repeat(counts)
        members[positions] = chunks[order]
        cursor += counts
