"""Streams are told apart by seed, name and numbers, and by nothing else."""

from __future__ import annotations

import hashlib
from itertools import combinations

import numpy as np

from stride_cli.randomness import stream, stream_key, torch_seed

ASKED = [(0, "a"), (1, "a"), (0, "b"), (0, "a", 0), (0, "a", 1), (0, "a", 0, 0), (0, "a", 1, 0), (0, "a", 10)]


def test_each_seed_name_and_number_has_a_stream_of_its_own() -> None:
    for one, other in combinations(ASKED, 2):
        left, right = (stream(*asked).random(2000) for asked in (one, other))
        assert abs(np.corrcoef(left, right)[0, 1]) < 0.12, (one, other)  # five standard errors
    assert len({torch_seed(*asked) for asked in ASKED}) == len(ASKED)
    assert all(0 <= torch_seed(*asked) < 1 << 63 for asked in ASKED)


def test_a_stream_is_the_same_whatever_was_drawn_before() -> None:
    first = stream(7, "fisher labels", 3).random(5)
    np.random.default_rng(0).random(100)
    stream(7, "fisher labels", 4).random(100)
    np.testing.assert_array_equal(stream(7, "fisher labels", 3).random(5), first)
    # what indexes on disk were drawn from: another key would be another design for the same seed
    assert stream_key(7, "fisher labels", 3) == int.from_bytes(
        hashlib.sha256(b"7/fisher labels/3").digest()[:16], "little"
    )
