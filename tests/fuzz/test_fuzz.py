"""A short run of what `python -m tests.fuzz` does for hours."""

from __future__ import annotations

import random
import time

import pytest

from tests import fuzz

SECONDS = 0.6  # of each target


# what asks an index trains a model first
@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(fuzz.known_targets()))
def test_nothing_escapes(name: str) -> None:
    target = fuzz.known_targets()[name]
    until = time.monotonic() + SECONDS
    number = 0
    while time.monotonic() < until:
        failure = fuzz.one_try(target, random.Random(f"{name}:0:{number}"))
        assert failure is None, (
            f"try {number}: python -m tests.fuzz --target {name} --first {number} --tries 1"
        )
        number += 1


def test_what_escapes_is_told() -> None:
    def failing(r: random.Random) -> None:
        fuzz.trying(b"data")
        raise ValueError("escaped")

    error, given = fuzz.one_try(failing, random.Random(0)) or (None, [])
    assert str(error) == "escaped" and given == [b"data"]
