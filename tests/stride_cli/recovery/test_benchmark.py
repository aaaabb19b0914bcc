"""The benchmark of recovery at a tiny size, so that it cannot rot."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_recovery_benchmark_prints_json_lines():
    command = [sys.executable, "-m", "tests.benchmarks", "recovery", "--chunks", "3000", "--subsets", "60"]
    result = subprocess.run(
        [*command, "--degree", "4", "--repeats", "1"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    records = [json.loads(line) for line in result.stdout.splitlines()]
    solved = [record for record in records if "relative_gap" in record]
    assert len(records) == 7 and len(solved) == 5
    assert all(record["relative_gap"] <= 1e-6 and record["bare_passes"] > 0 for record in solved)
    assert all(record["cpu"] and record["numba"] for record in records)


def test_unknown_benchmark_lists_those_there_are():
    command = [sys.executable, "-m", "tests.benchmarks", "nothing"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 2 and "recovery" in result.stderr and not result.stdout
