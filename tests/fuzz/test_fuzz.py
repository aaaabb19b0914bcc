"""A short run of what `python -m tests.fuzz` does for hours, and hypothesis over the readers of a corpus."""

from __future__ import annotations

import json
import random
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import fuzz
from tests.fuzz.targets import readers

SECONDS = 0.6  # of each target

names = st.sampled_from(readers.NAMES)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=100)
@given(st.lists(values, max_size=4), st.booleans())
def test_any_json_gives_documents_or_a_remedy(lines: list[Any], ascii_only: bool) -> None:
    text = "\n".join(json.dumps(line, ensure_ascii=ascii_only) for line in lines)
    data = text.encode("utf-8", "surrogatepass")
    for on_bad in ("error", "skip"):
        readers.read_stdin(data, readers.ReadOptions(on_bad=on_bad), 1 << 20)


@settings(max_examples=100)
@given(st.sampled_from(readers.tables()), st.data())
def test_a_damaged_table_gives_documents_or_a_remedy(table: bytes, data: st.DataObject) -> None:
    changed = bytearray(table)
    for place in data.draw(st.lists(st.integers(0, len(table) - 1), max_size=5)):
        changed[place] = data.draw(st.integers(0, 255))
    cut = data.draw(st.none() | st.integers(0, len(table)))
    readers.read_file("a.parquet", bytes(changed[:cut]), readers.ReadOptions(on_bad="skip"))


# what asks an index trains a model first
@pytest.mark.parametrize(
    "name",
    [
        name if name == "readers" else pytest.param(name, marks=pytest.mark.slow)
        for name in sorted(fuzz.known_targets())
    ],
)
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
