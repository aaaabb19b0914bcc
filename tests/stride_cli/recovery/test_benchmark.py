"""The benchmarks of recovery at a tiny size, so that they cannot rot."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.benchmarks import recovery, solvers

ROOT = Path(__file__).parents[3]
SIZE = ["--subsets", "60", "--degree", "4"]


def benchmark(*arguments: str) -> list[dict]:
    command = [sys.executable, "-m", "tests.benchmarks", *arguments]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.mark.slow
def test_recovery_benchmark_prints_json_lines(tmp_path):
    records = benchmark(
        "recovery", "--chunks", "3000", *SIZE, "--repeats", "1", "--folder", str(tmp_path),
        "--parts", "solves", "batch", "memory",
    )  # fmt: skip
    solved = [record for record in records if "relative_gap" in record]
    assert len(solved) == 4 + 5
    assert all(record["relative_gap"] <= 1e-6 and record["cpu_bare_passes"] > 0 for record in solved)
    assert all(record["cpu"] and record["versions"]["numba"] and record["n"] for record in records)
    assert sum(record["what"].startswith("memory") for record in records) == 6


@pytest.mark.slow
def test_growth_passes_over_a_design_several_times(monkeypatch):
    monkeypatch.setattr(recovery, "GROWTH_N", (1_000, 9_000))
    records = list(recovery.growth(recovery.columns_of(3_000, 60, 4), 60, 1))
    assert [record["n"] for record in records if record.get("axis") == "n"] == [1_000, 9_000]
    assert records[-1]["what"] == "slope in n" and len(records) == 3


def test_the_gap_is_that_of_the_objective(rng):
    columns = recovery.columns_of(400, 30, 4)
    y = rng.normal(size=30)
    matrix = np.zeros((30, 400))
    matrix[columns.T, np.arange(400)] = 1.0
    lambda_max = np.abs(matrix.T @ y).max()
    lambda_ = 0.3 * lambda_max
    solve = solvers.stride(columns, 30)
    indices, values = solve(y, 0.3, lambda_max, 1e-10)
    assert (
        0
        <= solvers.relative_gap(columns, y, lambda_, (indices, values), np.ones(len(columns))) + 1e-15
        < 1e-9
    )
    worse = values * 1.1  # what the gap says is at least what is lost
    weights = np.zeros(400)
    weights[indices] = values

    def objective(scale: float) -> float:
        left = y - matrix @ (scale * weights)
        return 0.5 * left @ left + lambda_ * np.abs(scale * weights).sum()

    lost = (objective(1.1) - objective(1.0)) / (0.5 * y @ y)
    assert solvers.relative_gap(columns, y, lambda_, (indices, worse), np.ones(400)) >= lost > 0


def test_solvers_agree_and_a_missing_one_is_recorded():
    found = list(solvers.run("scikit-learn", 2_000, 60, 4, 0.3, 2))
    assert [record["lambda_ratio"] for record in found] == list(recovery.LAMBDA_RATIOS)
    ours = list(solvers.run("stride", 2_000, 60, 4, 0.3, 2))
    for one, other in zip(found, ours, strict=True):
        assert one["reached"] and other["reached"] and one["cpu_bare_passes"] > 0
        assert one["lambda_ratio"] < 0.8 or one["nonzeros"] == other["nonzeros"]  # else w is not unique
        assert isinstance(one["memory_bytes"], int) and one["cpu"] and one["version"]
    name = "none"
    solvers.SOLVERS[name] = ("no_such_package", solvers.celer, (1e-6,))
    try:
        (record,) = solvers.run(name, 2_000, 60, 4, 0.3, 2)
    finally:
        del solvers.SOLVERS[name]
    assert "no_such_package" in record["missing"]
