"""The benchmark of stacked training runs."""

from __future__ import annotations

from tests.benchmarks.stacked_classifiers import run


def test_a_small_run() -> None:
    records = list(run(0.0, ["parkinsons"], [2, 3]))
    assert [record["at_once"] for record in records] == [1, 2, 3]
    assert all(record["speedup"] > 0 and record["milliseconds_per_step"] > 0 for record in records)
