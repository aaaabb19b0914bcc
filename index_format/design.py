"""The design matrix M: which subsets each chunk belongs to, from a counter-based generator.

Every chunk belongs to exactly ``degree`` of the ``n_subsets`` subsets (left-regular, paper sec. 3.2). The
subsets of chunk i are a function of (seed, i) alone: columns are computed in any order and any block size,
and an index grows without touching what is there.
"""

from __future__ import annotations

import errno
import itertools
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import numpy as np

from index_format.durable import storage

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
    _fill_rows(columns, sizes, members)
    return offsets_of(sizes), members


def iter_row_members(
    columns: Columns,
    sizes: np.ndarray,
    *,
    max_members: int = 1 << 20,
    directory: Path | None = None,
) -> Iterator[np.ndarray]:
    """``row_members`` in consecutive pieces, for a corpus whose transpose does not fit in memory.

    One pass over `columns`, which sorts each block by subset and keeps it in a file without a name, as large
    as ``row_members`` and K numbers for each block of 2**18 entries; a piece is then merged from the blocks.

    Parameters
    ----------
    columns : (n, d) uint16 or uint32
    sizes : (K,) int64        `row_sizes(columns, K)`
    max_members : int         of a piece: whole subsets, or one subset where that alone is larger
    directory : Path          where that file is made; default: the system's temporary directory

    Raises
    ------
    StorageFull               there is no space for the file
    """
    offsets = offsets_of(sizes)
    dtype = member_dtype(len(columns))
    bounds = [0]  # of the pieces, in subsets
    while bounds[-1] < len(sizes):
        end = int(np.searchsorted(offsets, offsets[bounds[-1]] + max_members, side="right")) - 1
        bounds.append(min(max(end, bounds[-1] + 1), len(sizes)))
    if len(bounds) <= 2:
        for _ in bounds[1:]:
            members = np.empty(int(offsets[-1]), dtype)
            _fill_rows(columns, sizes, members)
            yield members
        return
    directory = Path(tempfile.gettempdir()) if directory is None else directory
    with tempfile.TemporaryFile(dir=directory) as file:
        runs = _Runs(file.fileno(), directory, dtype)
        written = offsets[bounds[:-1]]  # members of each piece so far lie before this place
        for low, block in _blocks(columns):
            chunks, counts = _sorted_block(block, low, len(sizes), dtype)
            begins = offsets_of(counts)
            for piece, (first, last) in enumerate(itertools.pairwise(bounds)):
                some = chunks[begins[first] : begins[last]]
                runs.write_members(int(written[piece]), some)
                written[piece] += len(some)
            runs.add_counts(counts, int(offsets[-1]))
        for first, last in itertools.pairwise(bounds):
            members = np.empty(int(offsets[last] - offsets[first]), dtype)
            cursor = offsets_of(sizes[first:last])[:-1]  # where the next member of each subset goes
            place = int(offsets[first])
            for block_number in range(runs.n_blocks):
                counts = runs.read_counts(block_number, first, last)
                some = runs.read_members(place, int(counts.sum()))
                members[_places(cursor, counts)] = some
                cursor += counts
                place += len(some)
            yield members


class _Runs:
    """A file of members, grouped by piece, and of the sizes of each block's subsets behind them."""

    def __init__(self, fd: int, directory: Path, dtype: np.dtype) -> None:
        self._fd = fd
        self._directory = directory
        self._dtype = dtype
        self._counts_at = self._n_subsets = self.n_blocks = 0

    def write_members(self, place: int, members: np.ndarray) -> None:
        self._write(place * self._dtype.itemsize, members)

    def add_counts(self, counts: np.ndarray, n_members: int) -> None:
        self._counts_at, self._n_subsets = n_members * self._dtype.itemsize, len(counts)
        self._write(self._counts_at + self.n_blocks * 4 * self._n_subsets, counts.astype(np.uint32))
        self.n_blocks += 1

    def read_members(self, place: int, count: int) -> np.ndarray:
        return self._read(place * self._dtype.itemsize, count, self._dtype)

    def read_counts(self, block: int, first: int, last: int) -> np.ndarray:
        at = self._counts_at + (block * self._n_subsets + first) * 4
        return self._read(at, last - first, np.dtype(np.uint32)).astype(np.int64)

    def _write(self, at: int, values: np.ndarray) -> None:
        data = np.ascontiguousarray(values).view(np.uint8).data
        with storage(self._directory, len(data)):
            while len(data):
                done = os.pwrite(self._fd, data, at)
                data, at = data[done:], at + done

    def _read(self, at: int, count: int, dtype: np.dtype) -> np.ndarray:
        values = np.empty(count, dtype)
        data = values.view(np.uint8).data
        while len(data):
            done = os.preadv(self._fd, [data], at)
            if not done:
                raise OSError(errno.EIO, "a temporary file ends early", str(self._directory))
            data, at = data[done:], at + done
        return values


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


def _blocks(columns: Columns, entries: int = 1 << 18) -> Iterator[tuple[int, np.ndarray]]:
    """(first chunk, block of rows) over all of `columns`."""
    rows = max(1, entries // max(1, columns.shape[1]))
    for low in range(0, len(columns), rows):
        yield low, np.asarray(columns[low : low + rows])


def _fill_rows(columns: Columns, sizes: np.ndarray, members: np.ndarray) -> None:
    """Write the members of all subsets, in order, into `members`."""
    cursor = offsets_of(sizes)[:-1]  # where the next member of each subset goes
    for low, block in _blocks(columns):
        chunks, counts = _sorted_block(block, low, len(sizes), members.dtype)
        members[_places(cursor, counts)] = chunks
        cursor += counts


def _sorted_block(
    block: np.ndarray, low: int, n_subsets: int, dtype: np.dtype
) -> tuple[np.ndarray, np.ndarray]:
    """The chunks of a block that begins with chunk `low`, subset by subset, and how many each has."""
    subsets = block.ravel()
    order = np.argsort(subsets, kind="stable")  # stable: members stay ascending
    order //= block.shape[1]
    chunks = order.astype(dtype)
    chunks += dtype.type(low)
    return chunks, np.bincount(subsets, minlength=n_subsets)


def _places(cursor: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Where the next `counts` members of each subset go: (sum of counts,) int64."""
    begins = offsets_of(counts)
    places = (cursor - begins[:-1]).repeat(counts)
    places += np.arange(int(begins[-1]))
    return places
