from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from index_format.errors import StorageFull
from stride_cli.corpus import ids as module
from stride_cli.corpus.ids import SeenIds


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3000), st.sampled_from(["a.jsonl", "b.jsonl"])), max_size=200))
def test_ids_seen_are_told_with_their_first_place(lines: list[tuple[int, str]]) -> None:
    """Against a dict; ids repeat, and the table grows past its first size."""
    table = SeenIds(["known"])
    first: dict[str, str] = {"known": "the index that is appended to"}
    many = [(number, "c.jsonl") for number in range(10_000, 11_500)]
    for line, (number, source) in enumerate([*lines, *many, *lines, (0, "a.jsonl")], 1):
        name = str(number)
        assert table.take(name, source, line) == first.get(name)
        first.setdefault(name, f"{source}:{line}")
    assert table.take("known", "a.jsonl", 1) == first["known"]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    keys=st.lists(st.one_of(st.integers(0, 400), st.integers((1 << 64) - 40, (1 << 64) - 1)), max_size=300),
    spread=st.integers(51, 55),
    spare=st.integers(1, 40),
    moved=st.integers(1, 20),
    memory_bits=st.integers(0, 5),
)
def test_a_table_on_disk_is_a_dict(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    keys: list[int],
    spread: int,
    spare: int,
    moved: int,
    memory_bits: int,
) -> None:
    """Keys that crowd together, at both ends, in tables with hardly a spare slot, moved in small pieces."""
    for name, value in {
        "_FIRST_BITS": 2,
        "_SPARE": spare,
        "_MOVED": moved,
        "_MEMORY_BITS": memory_bits,
    }.items():
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(
        SeenIds, "_key", staticmethod(lambda name: ((int(name) << spread) % (1 << 64), int(name) // 3))
    )
    table = SeenIds(directory=tmp_path)
    first: dict[tuple[int, int], str] = {}
    for line, key in enumerate(keys, 1):
        known = ((key << spread) % (1 << 64), key // 3)
        assert table.take(str(key), "a", line) == first.get(known)
        first.setdefault(known, f"a:{line}")
    for place in first.values():
        line = int(place.removeprefix("a:"))
        assert table.take(str(keys[line - 1]), "b", 1) == place
    assert list(tmp_path.iterdir()) == []  # the file has no name


def test_many_ids_are_kept_on_disk(tmp_path: Path) -> None:
    table = SeenIds((str(number) for number in range(60_000)), tmp_path)
    assert table._table._memory is None
    assert all(table.take(str(number), "a", 1) for number in range(0, 60_000, 1_000))
    assert table.take("60000", "a", 7) is None
    assert table.take("60000", "b", 1) == "a:7"


def test_a_full_disk_is_an_error_with_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, data: bytes, place: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    seen = SeenIds(directory=tmp_path)
    monkeypatch.setattr(os, "pwrite", refuse)
    with pytest.raises(StorageFull) as full:
        for number in range(60_000):
            seen.take(str(number), "corpus.jsonl", number + 1)
    assert str(tmp_path) in str(full.value) and "free some space" in full.value.fix
    assert number > 40_000  # the smaller tables need no disk
