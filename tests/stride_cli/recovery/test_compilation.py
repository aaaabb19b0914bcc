"""Kernels are compiled once for each type of column, and never again: not by another process, not for columns
laid out otherwise or mapped read-only, not for another number of threads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from index_format.design import build_columns

ROOT = Path(__file__).parents[3]

SOLVE = """
import json, sys
import numpy as np
from numba.core.registry import CPUDispatcher
from stride_cli.recovery import kernels, newton
from stride_cli.recovery.lasso import solve_lasso
from stride_cli.recovery.screening import Design
from stride_cli.recovery.problem import LassoSettings

columns, y = np.load(sys.argv[1], mmap_mode=sys.argv[2] or None), np.load(sys.argv[3])
others = [np.asfortranarray(columns), columns[::-1], [columns[:900], columns[900:]]]
for given in [columns, *(others if sys.argv[2] else [])]:
    for ratio in (0.8, 0.05):
        solve_lasso(given, y, LassoSettings(ratio), n_subsets=len(y))
    Design(given, len(y)).count_neighbours(np.arange(2))
found = [v for module in (kernels, newton) for v in vars(module).values() if isinstance(v, CPUDispatcher)]
found.append(kernels.scan_kernel(columns.shape[1]))
print(json.dumps({
    "compiled": sum(sum(one.stats.cache_misses.values()) for one in found),
    "loaded": sum(sum(one.stats.cache_hits.values()) for one in found),
    "types": max(len(one.signatures) for one in found if one is not kernels.keep_largest_kernel),
}))
"""


def process(code: str, *arguments: str, folder: Path, **environment: str) -> str:
    settings = os.environ | {"PYTHONPATH": str(ROOT)} | environment
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=folder, env=settings, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_nothing_is_compiled_twice(tmp_path, rng):
    columns = build_columns(0, 3_000, n_subsets=60, degree=10, seed=0)
    np.save(tmp_path / "columns.npy", columns)
    np.save(tmp_path / "y.npy", rng.normal(size=60))
    places = str(tmp_path / "columns.npy"), str(tmp_path / "y.npy")
    cache = {"NUMBA_CACHE_DIR": str(tmp_path / "compiled")}
    first = json.loads(process(SOLVE, places[0], "", places[1], folder=ROOT, NUMBA_NUM_THREADS="2", **cache))
    assert first["compiled"] > 5 and first["types"] == 1
    second = json.loads(
        process(SOLVE, places[0], "r", places[1], folder=tmp_path, NUMBA_NUM_THREADS="1", **cache)
    )
    assert second["compiled"] == 0 and second["loaded"] > 5 and second["types"] == 1


@pytest.mark.slow
def test_a_solve_does_not_change_torchs_threads() -> None:
    """What is fitted after a query has the same bits as before it."""
    code = (
        "import numpy as np, torch\n"
        "from index_format.design import build_columns\n"
        "from stride_cli.recovery.screening import Design\n"
        "torch.set_num_threads(1)\n"
        "torch.ones(4) @ torch.ones(4)\n"
        "columns = build_columns(0, 200_000, n_subsets=50, degree=5, seed=0)\n"
        "Design(columns, 50).count_neighbours(np.arange(2))\n"
        "import numba\n"
        "print(torch.get_num_threads(), numba.threading_layer())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", "workqueue"]
