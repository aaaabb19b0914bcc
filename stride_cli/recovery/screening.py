"""The design as the solver reads it, and the passes over all its columns.

Of the paper's Lasso (eq. compressive_sensing_equation), min_w ½‖y − M w‖² + λ‖w‖₁ with residual r = y − M w,
the optimum is where

    m_i · r = λ sign(w_i) for w_i ≠ 0,        |m_i · r| ≤ λ for w_i = 0,

so almost all of the n columns need never be touched but to see that their score |m_i · r| is small. A pass
reads all of them for one residual and collects the largest scores; the problem is then solved over those.
What such a pass proves of the columns that it left out: `problem.Problem`.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from stride_cli.errors import NumericalError, UsageError
from stride_cli.recovery import kernels
from stride_cli.recovery.pool import Terms

# a shard is scanned in at most so many pieces, none smaller than this: fixed, so that results do not depend
# on the number of threads
_LANES, _LANE_COLUMNS = 64, 16_384
# columns read to guess a score's distribution: few runs, for each waits for a disk; columns are random, and
# those of one place as good as any
_SAMPLE_RUNS, _SAMPLE_RUN = 2, 8_192
_UNROLLED = 64  # largest degree the batch scan is compiled for
# residuals and columns from which on one batch scan is faster than a scan of each, and worth its compilation
_SHARED, _SHARED_COLUMNS = 6, 500_000
# room in a lane, in fair shares: good columns may sit together; less where 64 queries want room
_SPARE, _SPARE_SHARED = 8.0, 1.5

_NONE = np.empty(0, np.float32)

# numba's simplest threading layer ends the process when two threads enter it at once
_parallel = threading.Lock()


@dataclass(frozen=True)
class Candidates:
    """Columns that a scan collected, in ascending order.

    ids (C,) int64, values (C,) float64 (m_i · r); `largest` is the largest score over all n columns that
    reached the floor (-inf: none did); everything scored at or above `complete` is there.
    """

    ids: np.ndarray
    values: np.ndarray
    largest: float
    complete: float


class Scales(NamedTuple):
    """How far measurements may move each chunk's weight from what is expected of it.

    Attributes
    ----------
    spreads : (n,) float32     τ_i / max τ = 1 / ω_i, 0 … 1; 0: not at all
    lowest : (n,) float32      ≤ 0: the most that it may be lowered by; (0,): by anything
    """

    spreads: np.ndarray
    lowest: np.ndarray

    def terms(self, ids: np.ndarray) -> Terms:
        """Penalties and bounds of chunks `ids`."""
        lowest = self.lowest[ids].astype(np.float64) if len(self.lowest) else np.full(len(ids), -np.inf)
        return Terms(1.0 / self.spreads[ids].astype(np.float64), lowest)


class Design:
    """The columns of M (one array, or shards in order), checked once and read many times; nothing is copied.

    Parameters
    ----------
    columns : (n, d) uint16 or uint32 array, a sequence of such shards, or an object with `.shards`
        Row i lists the subsets that hold chunk i, ascending. Other integer types are converted (a copy).
    n_subsets : int
        K. Every entry is below it.

    Raises
    ------
    UsageError
        Shapes or types that are no columns, d > K, or a subset number ≥ K in uint32 columns. In uint16
        columns (the usual kind) numbers out of range are found by the first scan, which raises
        NumericalError.
    """

    def __init__(self, columns: Any, n_subsets: int) -> None:
        pieces = getattr(columns, "shards", columns if isinstance(columns, list | tuple) else [columns])
        if not len(pieces):
            raise UsageError("the design has no columns: an empty list of shards")
        self.n_subsets = int(n_subsets)
        self.shards = [_as_shard(piece, self.n_subsets) for piece in pieces]
        self.degree = int(self.shards[0].shape[1])
        self.dtype = self.shards[0].dtype
        if any(shard.shape[1] != self.degree or shard.dtype != self.dtype for shard in self.shards):
            raise UsageError("the shards of the design differ in degree or type")
        if not 1 <= self.degree <= self.n_subsets:
            raise UsageError(f"columns have {self.degree} subsets each, of {self.n_subsets} (1 ≤ d ≤ K)")
        self.starts = np.cumsum([0] + [len(shard) for shard in self.shards])
        self.n_chunks = int(self.starts[-1])
        # every value a uint16 can take; uint32 columns were checked above
        self._padded = max(65_536, self.n_subsets) if self.dtype == np.uint16 else self.n_subsets
        self._bounds = [_lanes(len(shard)) for shard in self.shards]
        self._vector = np.empty(0)  # a residual as scans read it: made once, its first K entries set anew

    def rows(self, ids: np.ndarray) -> np.ndarray:
        """Columns `ids` (any order) as a new (len, d) array."""
        ids = np.asarray(ids, dtype=np.int64)
        if len(self.shards) == 1:
            return np.take(self.shards[0], ids, axis=0)  # four times as quick as self.shards[0][ids]
        out = np.empty((len(ids), self.degree), self.dtype)
        shard_of = np.searchsorted(self.starts, ids, side="right") - 1
        for number, shard in enumerate(self.shards):
            here = shard_of == number
            out[here] = shard[ids[here] - self.starts[number]]
        return out

    @property
    def _sampled(self) -> list[tuple[int, int]]:
        """The runs of `_sample`; all columns where these are few."""
        if self.n_chunks <= _SAMPLE_RUNS * _SAMPLE_RUN:
            return [(0, self.n_chunks)]
        starts = [run * self.n_chunks // _SAMPLE_RUNS for run in range(_SAMPLE_RUNS)]
        return [(start, start + _SAMPLE_RUN) for start in starts]

    @cached_property
    def _sample(self) -> np.ndarray:
        """Runs of columns, from the first and from the middle on, to guess how scores are distributed."""
        sample = np.concatenate([self._slice(start, stop) for start, stop in self._sampled])
        if sample.size and sample.max() >= self.n_subsets:
            raise _damaged()
        return sample

    def _slice(self, start: int, stop: int) -> np.ndarray:
        """Columns `start` … `stop`-1, of one shard or several."""
        pieces = [self.shards[0][:0]]
        for shard, begin in zip(self.shards, self.starts.tolist(), strict=False):
            low, high = max(start, begin), min(stop, begin + len(shard))
            if low < high:
                pieces.append(shard[low - begin : high - begin])
        return np.concatenate(pieces) if len(pieces) > 2 else pieces[-1]

    def sample_scores(
        self, residual: np.ndarray, *, signed: bool, scales: Scales | None = None
    ) -> np.ndarray:
        """Scores of some columns, for `floor_for`."""
        sample = self._sample
        scores = np.empty(len(sample))
        kernels.inner_products_kernel(sample, residual, scores)
        if scales is not None:
            scores *= np.concatenate([scales.spreads[start:stop] for start, stop in self._sampled])
            signed = False  # a guess: which of them are one-sided is left to the scan
        return scores if signed else np.abs(scores, out=scores)

    def sums(self, weights: np.ndarray) -> np.ndarray:
        """M w, (K,) float64, for the weights (n,) of all chunks."""
        found = np.zeros(self._padded)
        for shard, start in zip(self.shards, self.starts.tolist(), strict=False):
            part = np.asarray(weights[start : start + len(shard)], np.float64)
            kernels.subtract_columns_kernel(shard, part, found)
        if found[self.n_subsets :].any():
            raise _damaged()
        return -found[: self.n_subsets]

    def floor_for(self, scores: np.ndarray, wanted: int) -> float:
        """A score that about `wanted` of the n columns reach, by those of a sample; never above the largest.

        -inf when `wanted` is all of them.
        """
        if wanted >= self.n_chunks:
            return -np.inf
        # the same share of the sample; of a sample's few, the largest at least
        keep = max(1, round(len(scores) * wanted / self.n_chunks))
        return float(np.partition(scores, len(scores) - keep)[len(scores) - keep])

    def scan(
        self, residual: np.ndarray, floor: float, *, signed: bool, capacity: int, scales: Scales | None = None
    ) -> Candidates:
        """One pass over all columns for one residual (K,): collect those whose score reaches `floor`.

        score_i = |m_i · r|, or m_i · r where `signed`; with `scales` divided by ω_i, and in absolute value
        where the weight may be lowered. When many more than `capacity` reach the floor, the
        smaller ones are dropped, lane by lane, and `complete` tells above which score none is missing.
        """
        found = []
        with _parallel:
            if not len(self._vector):
                self._vector = np.full(self._padded, np.nan)
            self._vector[: self.n_subsets] = residual  # NaN behind: see `kernels`
            # a lane of columns has room for `_SPARE` times its share of the capacity: lanes need nothing of
            # each other, and what they find does not depend on threads
            spreads, lowest = (_NONE, _NONE) if scales is None else scales
            kernel = kernels.scan_kernel(self.degree, scales is not None)
            for shard, bounds, start in zip(self.shards, self._bounds, self.starts, strict=False):
                out = _outputs((len(bounds) - 1,), _slots(capacity, bounds, _SPARE))
                own = slice(start, start + len(shard))
                kernel(shard, self._vector, spreads[own], lowest[own], floor, signed, bounds, *out)
                found.append(_gather(out, bounds + start, floor))
        return _concatenate(found)

    def scan_batch(
        self, residuals: Sequence[np.ndarray], floors: Sequence[float], *, signed: bool, capacity: int
    ) -> Iterator[Candidates]:
        """`scan` for several residuals, BATCH of them at a time so that the columns are read once for all.

        Each one's candidates are put together when they are asked for: 64 times as many take much memory.
        """
        few = len(residuals) < _SHARED or self.n_chunks < _SHARED_COLUMNS
        if few or self.degree > _UNROLLED:
            pairs = zip(residuals, floors, strict=True)
            for residual, low in pairs:
                yield self.scan(residual, low, signed=signed, capacity=capacity)
            return
        # 1. rounded residuals, four to a word: row k of the table is what subset k adds to all 64 sums
        table = np.empty((self.n_subsets, kernels.BATCH // 4), np.uint64)
        steps, lows = np.empty(kernels.BATCH), np.empty(kernels.BATCH)
        exact = np.zeros((kernels.BATCH, self.n_subsets))
        for first in range(0, len(residuals), kernels.BATCH):
            part = residuals[first : first + kernels.BATCH]
            exact[: len(part)] = part
            kernels.rounded_kernel(exact[: len(part)], self.degree, table, steps)
            lows[:] = np.inf  # unused places collect nothing
            lows[: len(part)] = floors[first : first + kernels.BATCH]
            # 2. every column's rounded sums are compared with what each residual's floor asks of them at
            # least; where one may reach it, the score is computed exactly
            found: list[list[Candidates]] = [[] for _ in part]
            out: tuple[np.ndarray, ...] = ()
            for number, (shard, bounds) in enumerate(zip(self.shards, self._bounds, strict=True)):
                if number:
                    for q, pieces in enumerate(found):
                        pieces.append(self._gathered(out, q, number - 1, lows))
                shape = (kernels.BATCH, len(bounds) - 1)
                slots = _slots(capacity, bounds, _SPARE_SHARED)
                out = _outputs(shape, slots)
                with _parallel:
                    kernels.scan_batch_kernel(self.degree)(
                        shard, exact, table, steps, lows, signed, bounds, *out
                    )
            # 3. each residual's candidates, ascending, as `scan` alone would have found them
            for q, pieces in enumerate(found):
                yield _concatenate([*pieces, self._gathered(out, q, len(self.shards) - 1, lows)])

    def _gathered(self, out: tuple[np.ndarray, ...], q: int, shard: int, floors: np.ndarray) -> Candidates:
        starts = self._bounds[shard] + self.starts[shard]
        return _gather(tuple(array[q] for array in out), starts, float(floors[q]))

    def count_neighbours(self, ids: np.ndarray) -> np.ndarray:
        """For each chunk of `ids`, how many other chunks share at least d − 1 subsets with it: (len,) int64.

        One pass over all columns for every 64 chunks.
        """
        wanted = self.rows(ids)
        counts = np.zeros(len(wanted), np.int64)
        for first in range(0, len(wanted), 64):
            part = wanted[first : first + 64]
            masks = np.zeros(self._padded, np.uint64)  # bit t of entry k: chunk t is in subset k
            for t, row in enumerate(part):
                masks[row] |= np.uint64(1) << np.uint64(t)
            for shard, bounds in zip(self.shards, self._bounds, strict=True):
                per_lane = np.empty((len(bounds) - 1, 64), np.int64)
                with _parallel:
                    kernels.neighbours_kernel(shard, masks, per_lane, bounds)
                counts[first : first + 64] += per_lane.sum(axis=0)[: len(part)]
        return counts - 1  # each was counted as its own neighbour


def _as_shard(piece: Any, n_subsets: int) -> np.ndarray:
    array = np.asarray(piece)
    if array.ndim != 2 or array.dtype.kind not in "ui":
        raise UsageError(f"columns must be a 2-D array of integers, not {array.ndim}-D {array.dtype}")
    if array.dtype not in (np.uint16, np.uint32):
        if array.size and (array.min() < 0 or array.max() >= n_subsets):
            raise UsageError(f"columns name subsets outside 0 … {n_subsets - 1}")
        array = array.astype(np.uint16 if n_subsets <= 65_536 else np.uint32)
    elif array.dtype == np.uint32 and array.size and array.max() >= n_subsets:
        raise UsageError(f"columns name subset {array.max()}, of {n_subsets}")
    # one read-only, contiguous view whatever came in, so that each kernel is compiled once
    view = np.ascontiguousarray(array).view()
    view.flags.writeable = False
    return view


def _lanes(length: int) -> np.ndarray:
    count = max(1, min(_LANES, length // _LANE_COLUMNS))
    return np.linspace(0, length, count + 1).astype(np.int64)


def _slots(capacity: int, bounds: np.ndarray, spare: float) -> int:
    """Room in each lane: `spare` times its fair share."""
    longest = int(np.diff(bounds).max())
    return max(2, min(longest, math.ceil(spare * capacity / (len(bounds) - 1))))


def _outputs(shape: tuple[int, ...], slots: int) -> tuple[np.ndarray, ...]:
    return (
        np.empty((*shape, slots), np.int32),
        np.empty((*shape, slots)),
        np.empty(shape, np.int64),
        np.empty(shape),
        np.empty(shape),
    )


def _gather(out: tuple[np.ndarray, ...], starts: np.ndarray, floor: float) -> Candidates:
    """Gather what the lanes found, whose first columns are `starts`."""
    lane_ids, lane_values, counts, dropped, largest = out
    if (counts < 0).any():
        raise _damaged()
    ids = np.empty(int(counts.sum()), np.int64)
    values = np.empty(len(ids))
    at = 0
    for lane, count in enumerate(counts.tolist()):  # lanes are in order, and each one's columns ascend
        ids[at : at + count] = lane_ids[lane, :count]
        ids[at : at + count] += starts[lane]
        values[at : at + count] = lane_values[lane, :count]
        at += count
    # complete: below the floor nothing was collected, below what a lane dropped not everything
    return Candidates(ids, values, float(largest.max()), max(floor, float(dropped.max())))


def _damaged() -> NumericalError:
    return NumericalError(
        "a column of the design names a subset that does not exist",
        fix="check the index with `stride index verify`",
    )


def _concatenate(parts: list[Candidates]) -> Candidates:
    if len(parts) == 1:
        return parts[0]
    return Candidates(
        ids=np.concatenate([part.ids for part in parts]),
        values=np.concatenate([part.values for part in parts]),
        largest=max(part.largest for part in parts),
        complete=max(part.complete for part in parts),
    )
