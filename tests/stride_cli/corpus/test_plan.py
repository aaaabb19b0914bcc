from __future__ import annotations

import itertools

import pytest

from stride_cli.corpus.options import DesignOptions
from stride_cli.corpus.plan import choose_block_size, choose_design, expected_neighbours, expected_overlapping
from stride_cli.errors import UsageError


@pytest.mark.parametrize(
    ("n_chunks", "subsets", "degree"),
    [(1, 1, 1), (2, 2, 1), (5, 5, 2), (20, 20, 10), (1000, 1000, 10), (1001, 1000, 10), (2999, 1000, 10),
     (6099, 2033, 10), (11_400_000, 65_535, 10)],
)  # fmt: skip
def test_defaults_fit_the_corpus(n_chunks: int, subsets: int, degree: int) -> None:
    assert choose_design(n_chunks) == (subsets, degree)


def test_what_is_given_is_taken() -> None:
    assert choose_design(100, DesignOptions(degree=30)) == (100, 30)
    assert choose_design(100, DesignOptions(n_subsets=7)) == (7, 3)


def test_neighbours_against_all_pairs_of_sets() -> None:
    k, d = 7, 3
    sets = [set(c) for c in itertools.combinations(range(k), d)]
    share = sum(len(sets[0] & other) >= d - 1 for other in sets) / len(sets)
    assert expected_neighbours(11, k, d) == pytest.approx(10 * share)
    assert expected_neighbours(11, 5, 1) == 10  # sharing none of one subset is allowed
    assert expected_neighbours(1, 5, 2) == 0
    third = sum(len(sets[0] & other) >= 1 for other in sets) / len(sets)
    assert expected_overlapping(11, k, d) == pytest.approx(10 * third)
    assert expected_overlapping(100, 50, 50) == 99  # every chunk in every subset
    assert expected_neighbours(10**9, 65_535, 1_000) == 0.0  # too small for a float, and no overflow


def test_block_sizes() -> None:
    assert choose_block_size(None, None) == 512
    assert choose_block_size(None, 8192) == 512
    assert choose_block_size(None, 128) == 128
    assert choose_block_size(64, 128) == 64
    with pytest.raises(UsageError, match="at most the model's context of 128"):
        choose_block_size(129, 128)
    with pytest.raises(UsageError, match="2 or more"):
        DesignOptions(block_size=1)
