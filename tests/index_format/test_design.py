from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from index_format import design
from index_format.design import build_columns
from stride_cli.research.paper.sgd import build_rows


@st.composite
def designs(draw, max_subsets=200):
    n_subsets = draw(st.integers(1, max_subsets))
    return {
        "n_subsets": n_subsets,
        "degree": draw(st.integers(1, n_subsets)),
        "seed": draw(st.integers(0, 2**64 - 1)),
    }


@given(designs(), st.integers(0, 50), st.integers(0, 50))
@settings(max_examples=80, deadline=None)
def test_columns_are_distinct_ascending_in_range_and_sliceable(how, start, count):
    columns = build_columns(start, start + count, **how)
    assert columns.shape == (count, how["degree"]) and columns.dtype == np.uint16
    assert (np.diff(columns.astype(int), axis=1) > 0).all()
    assert (columns < how["n_subsets"]).all()
    np.testing.assert_array_equal(columns, build_columns(0, start + count + 3, **how)[start : start + count])


@given(designs(60))
@settings(max_examples=40, deadline=None)
def test_both_ways_of_sampling_give_the_same_sets(how):
    keys = np.arange(40, dtype=np.uint64) * np.uint64(how["seed"] | 1)
    out = [np.empty((40, how["degree"]), np.uint16) for _ in range(2)]
    design._sample_by_comparison(keys, how["n_subsets"], out[0])
    design._sample_by_table(keys, how["n_subsets"], out[1])
    np.testing.assert_array_equal(*out)


def test_full_degree_and_wide_ids():
    assert build_columns(4, 6, n_subsets=5, degree=5, seed=9).tolist() == [[0, 1, 2, 3, 4]] * 2
    assert build_columns(0, 3, n_subsets=65536, degree=2, seed=0).dtype == np.uint16
    wide = build_columns(0, 4000, n_subsets=65537 * 4, degree=10, seed=0)
    assert wide.dtype == np.uint32 and wide.max() > 65536 * 3


@pytest.mark.parametrize("how", [{"n_subsets": 6, "degree": 3}, {"n_subsets": 7, "degree": 6}])
def test_every_set_is_equally_likely(how):
    n = 60_000
    columns = build_columns(0, n, seed=11, **how)
    sets = list(combinations(range(how["n_subsets"]), how["degree"]))
    codes = (columns * how["n_subsets"] ** np.arange(how["degree"])).sum(axis=1)
    expected = [sum(s * how["n_subsets"] ** i for i, s in enumerate(one)) for one in sets]
    counts = np.array([(codes == code).sum() for code in expected])
    assert counts.sum() == n
    chi_square = ((counts - n / len(sets)) ** 2 / (n / len(sets))).sum()
    freedom = len(sets) - 1
    assert abs(chi_square - freedom) < 5 * np.sqrt(2 * freedom)


def test_chunks_are_independent_of_each_other():
    """Pairs of chunks, near or far, share as many subsets as chance has it: d²/K on average."""
    n_subsets, degree, n = 50, 5, 40_000
    member = np.zeros((n, n_subsets), np.float32)
    np.put_along_axis(member, build_columns(0, n, n_subsets=n_subsets, degree=degree, seed=2), 1, axis=1)
    for lag in (1, 2, 3, 64, 1000):
        shared = (member[:-lag] * member[lag:]).sum(axis=1)
        deviation = shared.mean() - degree**2 / n_subsets
        assert abs(deviation) < 5 * shared.std() / np.sqrt(n)


def test_golden_columns():
    """The generator is part of the format: these must never change."""
    columns = build_columns(1000, 1003, n_subsets=100, degree=4, seed=42)
    assert columns.tolist() == [[20, 31, 41, 92], [13, 48, 59, 62], [41, 62, 92, 98]]


@given(designs(30), st.integers(0, 80))
@settings(max_examples=60, deadline=None)
def test_rows_are_the_transpose(how, n):
    columns = build_columns(0, n, **how)
    offsets, members = build_rows(columns, how["n_subsets"])
    assert offsets.dtype == np.int64 and members.dtype == np.uint32
    for subset in range(how["n_subsets"]):
        expected = np.flatnonzero((columns == subset).any(axis=1))
        np.testing.assert_array_equal(members[offsets[subset] : offsets[subset + 1]], expected)
