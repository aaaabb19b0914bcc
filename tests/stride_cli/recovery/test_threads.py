"""Recovery leaves torch's threads alone: what is fitted after a query has the same bits as before it."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.slow
def test_a_solve_does_not_change_torchs_threads() -> None:
    code = (
        "import numpy as np, torch\n"
        "from index_format.design import build_columns\n"
        "from stride_cli.recovery.screening import Design\n"
        "torch.set_num_threads(1)\n"
        "torch.ones(4) @ torch.ones(4)\n"
        "columns = build_columns(0, 200_000, n_subsets=50, degree=5, seed=0)\n"
        "Design(columns, 50).correlate(np.arange(50.0))\n"
        "import numba\n"
        "print(torch.get_num_threads(), numba.threading_layer())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", "workqueue"]
