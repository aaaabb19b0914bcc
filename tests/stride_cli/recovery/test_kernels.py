"""The compiled loops, against themselves uncompiled and against plain NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from stride_cli.recovery import kernels
from stride_cli.recovery.newton import conjugate_gradient_kernel
from stride_cli.recovery.screening import Design


@pytest.fixture
def columns(rng) -> np.ndarray:
    return np.sort(rng.random((300, 12)).argsort(axis=1)[:, :4], axis=1).astype(np.uint16)


def outputs(shape: tuple[int, ...], slots: int) -> tuple[np.ndarray, ...]:
    """Filled with a sentinel, so that what a kernel does not write compares equal."""
    return (
        np.full((*shape, slots), -7, np.int32),
        np.full((*shape, slots), -7.0),
        np.full(shape, -7),
        np.full(shape, -7.0),
        np.full(shape, -7.0),
    )


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("slots", [300, 8])
@pytest.mark.parametrize("weighted", [False, True])
def test_scan(columns, rng, signed, slots, weighted):
    residual = np.append(rng.normal(size=12), np.full(65_524, np.nan))
    bounds = np.array([0, 100, 100, 300])
    compiled, plain = outputs((3,), slots), outputs((3,), slots)
    scales = rng.choice([0.0, 0.5, 1.0], 300).astype(np.float32)
    lowest = rng.choice([-0.5, 0.0], 300).astype(np.float32)
    given = (columns, residual, scales, lowest, 1.0, signed, bounds)
    kernels.scan_kernel(4, weighted)(*given, *compiled)
    kernels.scan_kernel(4, weighted).py_func(*given, *plain)
    for one, other in zip(compiled, plain, strict=True):
        np.testing.assert_array_equal(one, other)
    ids, values, counts, dropped, largest = compiled
    products = residual[columns].sum(axis=1)
    if weighted:
        products = products * scales
        products = np.where(lowest < 0, np.abs(products), products) if signed else products
    score = products if signed else np.abs(products)
    for lane, (low, high) in enumerate([(0, 100), (100, 100), (100, 300)]):
        part = score[low:high]
        kept = ids[lane, : counts[lane]] + low
        assert largest[lane] == pytest.approx(part[part >= 1.0].max(initial=-np.inf))
        wanted = np.flatnonzero(part >= max(1.0, dropped[lane])) + low
        assert set(wanted) <= set(kept) and (np.diff(kept) > 0).all()
        assert (dropped[lane] == -np.inf) == (slots == 300 or high == low)
        np.testing.assert_allclose(values[lane, : counts[lane]], products[kept], atol=1e-12)


def rounded(residuals: np.ndarray, degree: int) -> tuple[np.ndarray, np.ndarray]:
    table = np.empty((residuals.shape[1], kernels.BATCH // 4), np.uint64)
    steps = np.empty(kernels.BATCH)
    kernels.rounded_kernel(residuals, degree, table, steps)
    return table, steps


@pytest.mark.slow  # compiles the kernel of one degree
@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("slots", [300, 16])
def test_batch_scan_is_as_many_scans(columns, rng, signed, slots):
    residuals = rng.normal(size=(kernels.BATCH, 12)) * np.logspace(-9, 9, kernels.BATCH)[:, None]
    residuals[5] = 0.0
    residuals[6, 1:] *= 1e-12  # one subset outweighs all others
    floors = np.linspace(0.0, 3.5, kernels.BATCH) * np.abs(residuals).mean(axis=1)
    floors[3], floors[4] = np.inf, -np.inf  # an unused place, and one that wants all columns
    bounds = np.array([0, 130, 300])
    compiled, plain = outputs((kernels.BATCH, 2), slots), outputs((kernels.BATCH, 2), slots)
    table, steps = rounded(residuals, 4)
    for function, out in (
        (kernels.scan_batch_kernel(4), compiled),
        (kernels.scan_batch_kernel(4).py_func, plain),
    ):
        function(columns, residuals, table, steps, floors, signed, bounds, *out)
    for q in range(kernels.BATCH):
        single = outputs((2,), slots)
        none = np.empty(0, np.float32)
        kernels.scan_kernel(4)(columns, residuals[q].copy(), none, none, floors[q], signed, bounds, *single)
        for one, other, uncompiled in zip(compiled, single, plain, strict=True):
            np.testing.assert_array_equal(one[q], other)  # to the last bit
            np.testing.assert_array_equal(one[q], uncompiled[q])


@pytest.mark.parametrize("degree", [1, 4, 10, 64])
def test_rounded_residuals_never_hide_a_column(rng, degree):
    """At a floor that is exactly some column's score, its rounded sum is within the limits."""
    columns = np.sort(rng.random((200, 80)).argsort(axis=1)[:, :degree], axis=1).astype(np.uint16)
    residuals = rng.normal(size=(kernels.BATCH, 80)) ** 3
    table, steps = rounded(residuals, degree)
    uncompiled = np.empty_like(table), np.empty_like(steps)
    kernels.rounded_kernel.py_func(residuals, degree, *uncompiled)
    np.testing.assert_array_equal(table, uncompiled[0])
    np.testing.assert_array_equal(steps, uncompiled[1])
    sums = table[columns].sum(axis=1)
    top = np.uint64(0x8000)
    for q in range(kernels.BATCH):
        products = residuals[q, columns].sum(axis=1)
        total = (sums[:, q // 4] >> np.uint64(16 * (q % 4))) & np.uint64(0xFFFF)
        assert (total < top).all()
        for i in range(0, 200, 13):
            above, below = np.zeros(kernels.BATCH // 4, np.uint64), np.zeros(kernels.BATCH // 4, np.uint64)
            kernels.limit_kernel(q, abs(products[i]), steps[q], degree, False, above, below)
            high = (above[q // 4] >> np.uint64(16 * (q % 4))) & np.uint64(0xFFFF)
            low = (below[q // 4] >> np.uint64(16 * (q % 4))) & np.uint64(0xFFFF)
            marked = ((total + high) | (low - total)) & top != 0
            assert marked[np.abs(products) >= abs(products[i])].all()
            if degree <= 10:  # and few others are looked at
                slack = (degree + 2) * steps[q]
                assert not marked[np.abs(products) < abs(products[i]) - slack].any()


def test_batch_scan_notices_a_damaged_subset_number(columns, rng):
    damaged = columns.copy()
    damaged[200, 1] = 12
    residuals = rng.normal(size=(kernels.BATCH, 12))
    out = outputs((kernels.BATCH, 2), 16)
    table, steps = rounded(residuals, 4)
    floors = np.full(kernels.BATCH, np.inf)
    kernels.scan_batch_kernel(4)(
        damaged, residuals, table, steps, floors, False, np.array([0, 130, 300]), *out
    )
    assert (out[2][:, 0] == 0).all() and (out[2][:, 1] == -1).all()


def test_selection_is_numpys(rng):
    for n in (1, 2, 3, 100):
        drawn = rng.normal(size=n)
        for scores in (drawn, np.sort(drawn), -np.sort(drawn), np.ones(n), np.floor(2 * drawn)):
            for place in {0, n // 3, n - 1}:
                assert kernels.at_place_kernel(scores.copy(), place) == np.partition(scores, place)[place]


@pytest.mark.parametrize("signed", [False, True])
def test_keep_largest(rng, signed):
    values = rng.integers(-5, 6, 40).astype(float)
    scores = values if signed else np.abs(values)
    expected = sorted(sorted(range(30), key=lambda i: (-scores[i], i))[:11])
    for function in (kernels.keep_largest_kernel, kernels.keep_largest_kernel.py_func):
        kept, ids = values.copy(), np.arange(40, dtype=np.int32)
        threshold = function(ids, kept, 30, 11, signed)
        assert ids[:11].tolist() == expected
        np.testing.assert_array_equal(kept[:11], values[expected])
        assert threshold == np.nextafter(scores[expected].min(), np.inf)


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("nonneg", [False, True])
def test_descend(columns, rng, centred, nonneg):
    y = rng.normal(size=12)
    y -= y.mean() if centred else 0.0
    results = []
    penalties = rng.uniform(0.1, 0.5, 50)
    lowest = rng.choice([-0.1, 0.0], 50) if nonneg else np.full(50, -np.inf)
    for function in (kernels.descend_kernel, kernels.descend_kernel.py_func):
        weights, residual = np.zeros(50), y.copy()
        order = np.arange(50)
        epochs = function(columns[:50], weights, residual, penalties, lowest, centred, order, 25, 0.0)
        assert (weights >= lowest).all() and ((weights == lowest).any() or not nonneg)
        results.append((weights, residual, epochs))
    np.testing.assert_allclose(results[0][0], results[1][0], atol=1e-13)
    np.testing.assert_allclose(results[0][1], results[1][1], atol=1e-13)
    assert results[0][2] == results[1][2] == 25
    matrix = np.zeros((12, 50))
    matrix[columns[:50].T, np.arange(50)] = 1.0
    if centred:
        matrix -= 4 / 12
    np.testing.assert_allclose(results[0][1], y - matrix @ results[0][0], atol=1e-12)


def test_descend_stops_when_steps_are_small(columns, rng):
    weights, residual = np.zeros(50), rng.normal(size=12)
    epochs = kernels.descend_kernel(
        columns[:50],
        weights,
        residual,
        np.full(50, 0.3),
        np.full(50, -np.inf),
        False,
        np.arange(50),
        10_000,
        1e-9,
    )
    assert 1 < epochs < 1_000


@pytest.mark.parametrize("centred", [False, True])
def test_conjugate_gradients_solve_the_system(columns, rng, centred):
    part, sigma = columns[:20], rng.uniform(0.1, 9)
    matrix = np.zeros((12, 20))
    matrix[part.T, np.arange(20)] = 1.0
    right = rng.normal(size=12)
    if centred:
        matrix -= 4 / 12
        right -= right.mean()
    expected = np.linalg.solve(np.eye(12) + sigma * matrix @ matrix.T, right)
    for function in (conjugate_gradient_kernel, conjugate_gradient_kernel.py_func):
        found = np.zeros(12)
        function(part, sigma, right, 1e-12, 100, centred, found)
        np.testing.assert_allclose(found, expected, atol=1e-10)


def test_small_kernels_equal_their_python(columns, rng):
    vector, weights = rng.normal(size=12), rng.normal(size=300)
    out, plain = np.empty(300), np.empty(300)
    kernels.inner_products_kernel(columns, vector, out)
    kernels.inner_products_kernel.py_func(columns, vector, plain)
    np.testing.assert_array_equal(out, plain)
    np.testing.assert_allclose(out, vector[columns].sum(axis=1), atol=1e-12)
    one, other = vector.copy(), vector.copy()
    kernels.subtract_columns_kernel(columns, weights, one)
    kernels.subtract_columns_kernel.py_func(columns, weights, other)
    np.testing.assert_allclose(one, other, atol=1e-13)
    np.testing.assert_allclose(one, vector - np.bincount(columns.ravel(), np.repeat(weights, 4)), atol=1e-11)


def test_neighbours_kernel_equals_its_python(columns):
    masks = np.zeros(12, np.uint64)
    for t, row in enumerate(columns[:64]):
        masks[row] |= np.uint64(1) << np.uint64(t)
    bounds = np.array([0, 200, 300])
    compiled, plain = np.empty((2, 64), np.int64), np.empty((2, 64), np.int64)
    kernels.neighbours_kernel(columns, masks, compiled, bounds)
    kernels.neighbours_kernel.py_func(columns, masks, plain, bounds)
    np.testing.assert_array_equal(compiled, plain)


def test_equal_rows_and_only_they_have_equal_hashes(columns):
    hashes = np.empty(300, np.uint64)
    kernels.hash_rows_kernel(columns, hashes)
    _, by_row = np.unique(columns, axis=0, return_inverse=True)
    _, by_hash = np.unique(hashes, return_inverse=True)
    same_row = by_row.ravel()[:, None] == by_row.ravel()
    np.testing.assert_array_equal(same_row, by_hash[:, None] == by_hash)
    assert same_row.sum() > 300  # the sample does hold twins


def test_floor_is_reached_by_about_as_many_as_wanted(rng):
    columns = np.sort(rng.random((50_000, 40)).argsort(axis=1)[:, :4], axis=1).astype(np.uint16)
    design, residual = Design(columns, 40), rng.normal(size=40)
    for wanted in (100, 5_000):
        floor = design.floor_for(design.sample_scores(residual, signed=False), wanted)
        reached = (np.abs(residual[columns].sum(axis=1)) >= floor).sum()
        assert wanted / 2 <= reached <= wanted * 2
    assert design.floor_for(design.sample_scores(residual, signed=True), 50_000) == -np.inf


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("capacity", [1, 20, 300])
def test_a_scan_says_from_which_score_on_nothing_is_missing(columns, rng, capacity, signed):
    """Also where it has dropped columns for want of room, shard after shard."""
    residual = rng.normal(size=12)
    score = residual[columns].sum(axis=1) if signed else np.abs(residual[columns].sum(axis=1))
    found = Design([columns[:120], columns[120:]], 12).scan(residual, 0.5, signed=signed, capacity=capacity)
    assert set(np.flatnonzero(score >= found.complete)) <= set(found.ids)
    assert found.largest == pytest.approx(score.max())
    missing = np.setdiff1d(np.flatnonzero(score >= 0.5), found.ids)
    assert (len(missing) > 0) == (capacity < 20) == (found.complete > 0.5)
