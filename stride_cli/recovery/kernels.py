"""Compiled loops over left-d-regular binary columns: scanning, coordinate descent, neighbours.

Every function takes plain NumPy arrays and runs uncompiled through `.py_func`. A column of the design matrix
M is the sorted list of the d subsets that hold the chunk, so `m_i · r` is the sum of d entries of r.

A residual handed to a scan is padded with NaN up to every value that a subset number can take (2^16 entries
for uint16 columns): a damaged number then reads NaN instead of somebody else's memory, and NaN is noticed
below.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np
from numba import config, prange

from stride_cli.startup import compiled

# not OpenMP, whose thread count belongs to the whole process: after a first query torch would compute with
# other threads, and to other bits, than before it
config.THREADING_LAYER = "workqueue"

BATCH = 64
"""Residuals that the batch scan reads at once, as 16-bit sums, four to a machine word."""

USUAL = 10
"""The degree that designs have unless told otherwise; the scan of one residual has a kernel for it."""

_WORDS = BATCH // 4
_SUM = 32_767  # the largest sum in 16 bits that leaves the top bit free
_TOPS = np.uint64(0x8000_8000_8000_8000)


@compiled
def at_place_kernel(scores, place):
    """Find the score at `place` in sorted order by quickselect; the scores are moved about.

    As `np.partition` finds it, which takes numba seconds to compile and half a second to load.
    """
    first, last = 0, len(scores) - 1
    while first < last:
        # the middle one: scores that are sorted already are halved each time
        pivot = scores[(first + last) // 2]
        i, j = first, last
        while i <= j:
            while scores[i] < pivot:
                i += 1
            while scores[j] > pivot:
                j -= 1
            if i <= j:
                scores[i], scores[j] = scores[j], scores[i]
                i += 1
                j -= 1
        # what is between j and i equals the pivot, and is where it belongs
        if place <= j:
            last = j
        elif place >= i:
            first = i
        else:
            break
    return scores[place]


@compiled
def keep_largest_kernel(ids, values, count, keep, signed):
    """Move the `keep` largest of the first `count` entries to the front, in their order; equal ones by age.

    Returns the threshold that an entry must reach from now on to be larger than all that was dropped.
    """
    scores = np.empty(count)
    for i in range(count):
        scores[i] = values[i] if signed else abs(values[i])
    # the keep-th largest score; of the entries that have just that, the first ones fill what room is left
    cut = at_place_kernel(scores.copy(), count - keep)
    spare = keep
    for i in range(count):
        if scores[i] > cut:
            spare -= 1
    at = 0
    for i in range(count):
        if scores[i] > cut or (scores[i] == cut and spare > 0):
            if scores[i] == cut:
                spare -= 1
            # towards the front: nothing that is still to be read is overwritten
            ids[at] = ids[i]
            values[at] = values[i]
            at += 1
    return np.nextafter(cut, np.inf)


@lru_cache(maxsize=4)
def _scan_kernel(known: int, weighted: bool) -> Callable[..., None]:
    @compiled(parallel=True)
    def kernel(
        columns, residual, scales, lowest, floor, signed, bounds, ids, values, counts, dropped, largest
    ):  # fmt: skip
        capacity = ids.shape[1]
        for lane in prange(counts.shape[0]):
            threshold = floor  # rises when the lane is full
            best = -np.inf
            count = 0
            dropped[lane] = -np.inf
            for i in range(bounds[lane], bounds[lane + 1]):
                value = 0.0  # m_i · r: M is binary, so d additions
                for j in range(known or columns.shape[1]):
                    value += residual[columns[i, j]]
                if weighted:
                    value *= scales[i]
                    if signed and lowest[i] < 0.0:  # may be lowered, too
                        value = abs(value)
                score = value if signed else abs(value)
                if not (score < threshold):  # also true of NaN
                    if score != score:  # NaN: a subset that does not exist
                        count = -1
                        break
                    if weighted and scales[i] == 0.0:  # known exactly: no variable
                        continue
                    # full: the larger half stays, and from now on only what beats all that was dropped comes
                    # in. The best is seen before that, so it is right whatever is dropped
                    if count == capacity:
                        threshold = keep_largest_kernel(ids[lane], values[lane], count, capacity // 2, signed)
                        count = capacity // 2
                        dropped[lane] = threshold
                    if score > best:
                        best = score
                    if score >= threshold:
                        ids[lane, count] = i - bounds[lane]
                        values[lane, count] = value
                        count += 1
            counts[lane] = count
            largest[lane] = best

    return kernel


def scan_kernel(degree: int, weighted: bool = False) -> Callable[..., None]:
    """One pass over all columns: the largest score, and every column whose score reaches `floor`.

    score_i = |m_i · r|, or m_i · r where `signed`; times scales_i where `weighted`.

    A loop whose length is known takes 4 ns a column where another takes 7: the usual degree has a kernel of
    its own, all others share one.

    Parameters of the kernel
    ------------------------
    columns : (n, d) uint16 or uint32
    residual : (P,) float64       padded with NaN to P = 2^16 (uint16); every entry in range (uint32)
    scales : (n,) float32         τ_i; 0: the column is never collected. Only looked at where `weighted`
    lowest : (n,) float32         ≤ 0; below 0 the sign of a score does not count. Likewise, where `signed`
    floor : float                 columns below it are not collected
    signed : bool
    bounds : (L + 1,) int64       lane l covers columns bounds[l] .. bounds[l + 1]
    ids : (L, C) int32            output; the first counts[l] entries of each lane, from its first column on
    values : (L, C) float64       output; m_i · r, times scales_i where `weighted`
    counts : (L,) int64           output; -1 where a lane met a subset number out of range
    dropped : (L,) float64        output; entries below this score may be missing (-inf: none is missing)
    largest : (L,) float64        output; the largest score seen at or above `floor`, else -inf
    """
    return _scan_kernel(USUAL if degree == USUAL else 0, weighted)


@compiled
def rounded_kernel(residuals, degree, table, steps):
    """Residuals in 16 bits, four to a word, so that one addition of words adds four of them.

    Entry k of residual q becomes round(r_k / step_q) + ⌊16383 / d⌋ ≥ 0, in bits 16 (q mod 4) … of word
    table[k, q // 4]; a sum of d such entries stays below 2^15, so that nothing is carried into its neighbour.

    Parameters
    ----------
    residuals : (Q, K) float64          Q ≤ BATCH, and d ≤ 64
    degree : int
    table : (K, BATCH / 4) uint64       output
    steps : (BATCH,) float64            output; 1 where there is no residual
    """
    middle = _SUM // (2 * degree)  # what zero becomes; entries are 0 … 2 middle, and d of them ≤ 2^15 − 1
    table[:] = np.uint64(0)
    steps[:] = 1.0
    for q in range(residuals.shape[0]):
        largest = 0.0
        for k in range(residuals.shape[1]):
            largest = max(largest, abs(residuals[q, k]))
        if largest > 0.0:
            steps[q] = largest / middle
        shift = np.uint64(16 * (q % 4))
        for k in range(residuals.shape[1]):
            entry = np.uint64(round(residuals[q, k] / steps[q]) + middle)
            table[k, q // 4] |= entry << shift


@compiled
def limit_kernel(q, threshold, step, degree, signed, above, below):
    """Set the limits of residual q for rounded sums, so that none is missed whose score reaches `threshold`.

    Rounding moves a sum by at most d / 2 steps; one more step covers that of floating point. The top bit of
    sum + above is set where the sum is large enough, that of below − sum where it is small enough.

        S = Σ_{k ∈ m} (round(r_k / step) + middle)  ⇒  |S − d middle − m · r / step| ≤ d / 2
        m · r ≥  θ  ⇒  S ≥ d middle + θ / step − d / 2 ≥ high
        m · r ≤ −θ  ⇒  S ≤ d middle − θ / step + d / 2 ≤ low

    With above = 2^15 − high, bit 15 of S + above says S ≥ high; with below = 2^15 + low, that of below − S
    says S ≤ low. As 0 ≤ S < 2^15, neither carries into the next sum of the word nor borrows from it.
    """
    middle = degree * (_SUM // (2 * degree))
    limit = np.floor(threshold / step - 0.5 * degree) - 1.0
    high = int(min(max(middle + limit, 0.0), _SUM + 1.0))
    low = -1 if signed else int(min(max(middle - limit, -1.0), _SUM + 0.0))
    shift = np.uint64(16 * (q % 4))
    others = ~(np.uint64(0xFFFF) << shift)
    above[q // 4] = (above[q // 4] & others) | (np.uint64(_SUM + 1 - high) << shift)
    below[q // 4] = (below[q // 4] & others) | (np.uint64(_SUM + 1 + low) << shift)


@compiled
def collect_kernel(
    columns, residuals, table, steps, signed, i, lane, start, totals, above, below, threshold, count, best,
    ids, values, dropped,
):  # fmt: skip
    """Enter column i into the lists of those queries whose threshold its exact score reaches.

    One column of many comes here: its sums are made again, word by word, to tell for which of the 64
    residuals it may matter; for those its score is added up in float64, in the order of `scan_kernel`.
    """
    degree = columns.shape[1]
    capacity = ids.shape[2]
    half = capacity // 2
    totals[:] = np.uint64(0)
    for j in range(degree):
        subset = columns[i, j]
        for word in range(_WORDS):
            totals[word] += table[subset, word]
    for word in range(_WORDS):
        marks = ((totals[word] + above[word]) | (below[word] - totals[word])) & _TOPS
        if marks == np.uint64(0):
            continue
        for part in range(4):
            if (marks >> np.uint64(16 * part + 15)) & np.uint64(1) == np.uint64(0):
                continue
            q = 4 * word + part
            value = 0.0
            for j in range(degree):
                value += residuals[q, columns[i, j]]
            score = value if signed else abs(value)
            if score < threshold[q]:
                continue  # near it: rounding alone had let the column pass
            # full: as in `scan_kernel`; with the threshold rises what rounded sums are asked for
            if count[q] == capacity:
                threshold[q] = keep_largest_kernel(ids[q, lane], values[q, lane], capacity, half, signed)
                count[q] = half
                dropped[q, lane] = threshold[q]
                limit_kernel(q, threshold[q], steps[q], degree, signed, above, below)
            if score > best[q]:
                best[q] = score
            if score >= threshold[q]:
                at = count[q]
                ids[q, lane, at] = i - start
                values[q, lane, at] = value
                count[q] = at + 1


@lru_cache(maxsize=8)
def scan_batch_kernel(degree: int) -> Callable[..., None]:
    """`scan_kernel` for BATCH residuals at once, compiled for one degree d ≤ 64.

    The kernel has the arguments of `scan_kernel`, with residuals (BATCH, K) float64, their `rounded_kernel`
    table and steps, floor (BATCH,) — +inf where a place is not used — and a first axis of BATCH in every
    output. Sums of rounded residuals, four to a word, tell which columns may reach a threshold; only those
    are added up exactly, in the order of `scan_kernel`, so that what is collected has the same bits.
    """

    @compiled(parallel=True)
    def kernel(
        columns, residuals, table, steps, floor, signed, bounds, ids, values, counts, dropped, largest
    ):  # fmt: skip
        n_subsets = table.shape[0]
        for lane in prange(bounds.shape[0] - 1):
            here = np.int64(lane)  # one type, compiled once, before and after numba makes threads of the loop
            threshold = floor.copy()
            best = np.full(BATCH, -np.inf)
            count = np.zeros(BATCH, np.int64)
            dropped[:, lane] = -np.inf
            totals = np.zeros(_WORDS, np.uint64)
            above, below = np.zeros(_WORDS, np.uint64), np.zeros(_WORDS, np.uint64)
            for q in range(BATCH):
                limit_kernel(q, threshold[q], steps[q], columns.shape[1], signed, above, below)
            for i in range(bounds[lane], bounds[lane + 1]):
                # NaN has no place in 16 bits: subsets that do not exist are told by their number
                last = np.intp(0)
                for j in range(degree):
                    last = max(last, np.intp(columns[i, j]))
                if last >= n_subsets:
                    count[:] = -1
                    break
                marks = np.uint64(0)
                # nothing but words, no early exit, no store: that makes vector instructions of this loop
                for word in range(_WORDS):
                    total = np.uint64(0)
                    for j in range(degree):
                        total += table[np.intp(columns[i, j]), word]  # four residuals' sums in one addition
                    # two comparisons of each of the four, in their top bits: S ≥ high, or S ≤ low
                    marks |= (total + above[word]) | (below[word] - total)
                if marks & _TOPS != np.uint64(0):
                    collect_kernel(
                        columns, residuals, table, steps, signed, i, here, bounds[lane], totals, above, below,
                        threshold, count, best, ids, values, dropped,
                    )  # fmt: skip
            counts[:, lane] = count
            largest[:, lane] = best

    return kernel


@compiled
def inner_products_kernel(rows, vector, out):
    """out[i] = m_i · vector for a small set of columns, in one thread (many queries may run at once)."""
    degree = rows.shape[1]
    for i in range(rows.shape[0]):
        value = 0.0
        for j in range(degree):
            value += vector[rows[i, j]]
        out[i] = value


@compiled
def subtract_columns_kernel(rows, weights, vector):
    """vector -= M w in place, for the columns `rows` (W, d) and their weights (W,)."""
    for i in range(rows.shape[0]):
        if weights[i] != 0.0:
            for j in range(rows.shape[1]):
                vector[rows[i, j]] -= weights[i]


@compiled
def descend_kernel(rows, weights, residual, penalties, lowest, centred, order, n_epochs, threshold):
    """Cyclic coordinate descent over the columns in `order`; changes `weights` and `residual` in place.

        min_v  ½‖r‖² + Σ_i penalty_i |v_i|,  v_i ≥ lowest_i,    r = y_c − (M − d/K) v   (centred), or y − M v

    With an unpenalised intercept the columns are centred: every one has the mean d/K, so a step δ lowers the
    d entries of its subsets by δ and the mean of the residual by δ d / K. That mean is carried in one number
    instead of K additions, and taken off at the end.

    Parameters
    ----------
    rows : (W, d)             columns of the working set
    weights : (W,) float64    v, in and out
    residual : (K,) float64   in and out; sums to zero where `centred`
    penalties : (W,) float64  > 0
    lowest : (W,) float64     ≤ 0
    order : (V,) int64        which columns to visit
    n_epochs : int            at most so many rounds over `order`
    threshold : float         stop when no step of a round changed the objective's gradient by more than this

    Returns
    -------
    int                       epochs done
    """
    degree = rows.shape[1]
    n_subsets = residual.shape[0]
    norm = degree - degree * degree / n_subsets if centred else float(degree)
    mean = 0.0  # of `residual` as stored; what `residual` stands for is `residual - mean`
    epochs = 0
    for _ in range(n_epochs):
        epochs += 1
        biggest = 0.0
        for at in range(order.shape[0]):
            i = order[at]
            # 1. −∂/∂v_i of the squares, were v_i zero
            product = -degree * mean
            for j in range(degree):
                product += residual[rows[i, j]]
            old = weights[i]
            target = product + norm * old
            # 2. The minimum along v_i: soft thresholding, then the bound
            penalty = penalties[i]
            if target > penalty:
                new = (target - penalty) / norm
            elif target < -penalty:
                new = max((target + penalty) / norm, lowest[i])
            else:
                new = 0.0
            step = new - old
            # 3. The residual follows in the d subsets of the column
            if step != 0.0:
                weights[i] = new
                for j in range(degree):
                    residual[rows[i, j]] -= step
                if centred:
                    mean -= step * degree / n_subsets
                if abs(step) > biggest:
                    biggest = abs(step)
        if biggest * norm <= threshold:
            break
    if mean != 0.0:
        for k in range(n_subsets):
            residual[k] -= mean
    return epochs


@compiled(parallel=True)
def neighbours_kernel(columns, masks, counts, bounds):
    """Count the columns that share at least d − 1 subsets with each of up to 64 wanted ones, itself included.

    Bit t of `masks[k]` says that wanted column t is in subset k, so one pass serves all of them: a column is
    a neighbour of t when bit t is missing from at most one of its d masks.

    Parameters
    ----------
    columns : (n, d)         sorted, distinct subset numbers
    masks : (P,) uint64      P covers every value that a subset number can take
    counts : (L, 64) int64   output, one row per lane
    bounds : (L + 1,) int64  lane l covers columns bounds[l] .. bounds[l + 1]
    """
    degree = columns.shape[1]
    for lane in prange(bounds.shape[0] - 1):
        counts[lane, :] = 0
        for i in range(bounds[lane], bounds[lane + 1]):
            whole = ~np.uint64(0)  # missed nowhere so far
            once = np.uint64(0)  # missed in exactly one subset
            for j in range(degree):
                mask = masks[columns[i, j]]
                once = (once & mask) | (whole & ~mask)
                whole &= mask
            left = whole | once if degree > 1 else whole  # sharing 0 of 1 subset is no likeness
            t = 0
            while left != 0:
                if left & np.uint64(1):
                    counts[lane, t] += 1
                left >>= np.uint64(1)
                t += 1


@compiled
def hash_rows_kernel(rows, out):
    """64-bit mix (splitmix64) of every row of (N, d) into out (N,) uint64; equal rows have equal hashes."""
    for i in range(rows.shape[0]):
        state = np.uint64(0)
        for j in range(rows.shape[1]):
            state = (state ^ np.uint64(rows[i, j])) + np.uint64(0x9E3779B97F4A7C15)
            state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            state ^= state >> np.uint64(31)
        out[i] = state
