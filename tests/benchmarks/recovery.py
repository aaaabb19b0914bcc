"""What a query costs in recovery, as a multiple of one bare pass over the columns (same kernel, same run).

The design is generated in memory: n = 11.4 M chunks, d = 10, K = 1000 (the paper's NanoChat corpus). y is
what a few dozen chunks add up to, plus noise. Repetitions are interleaved, so that other load on the machine
falls on all measurements alike; the ratio of the minima is the figure to look at. Compilation is done before,
on a small design, and reported apart.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numba
import numpy as np

from index_format.design import build_columns
from stride_cli.output import emit
from stride_cli.recovery.lasso import Solution, solve_batch, solve_lasso, solve_path
from stride_cli.recovery.screening import Design

LAMBDA_RATIOS = (0.8, 0.1, 0.01)
PATH = (0.8, 0.4, 0.2, 0.1, 0.05, 0.02, 0.01)
BATCH = 16


def measurements(columns: np.ndarray, n_subsets: int, count: int, noise: float) -> np.ndarray:
    """(count, K): 50 random chunks with weights 1, 1/2, 1/3 … of either sign, of unit spread, plus noise."""
    rng = np.random.default_rng(1)
    y = np.zeros((count, n_subsets))
    for row in y:
        chosen = rng.choice(len(columns), min(50, len(columns)), replace=False)
        weights = rng.choice([-1.0, 1.0], len(chosen)) / np.arange(1, len(chosen) + 1)
        np.add.at(row, columns[chosen], weights[:, None])
    return y / y.std(axis=1, keepdims=True) + noise * rng.normal(size=y.shape)


def bare_pass(design: Design, residual: np.ndarray) -> None:
    """Every column's correlation compared with a floor that none reaches."""
    design.scan(residual, np.inf, signed=False, capacity=16)


def run(n: int, n_subsets: int, degree: int, repeats: int, noise: float) -> Iterator[dict[str, Any]]:
    size = {"n": n, "n_subsets": n_subsets, "degree": degree, "noise": noise}

    began = time.perf_counter()
    small = build_columns(0, 2_000, n_subsets=n_subsets, degree=degree, seed=0)
    warm_up = measurements(small, n_subsets, BATCH, noise)
    for ratio in LAMBDA_RATIOS:
        solve_lasso(small, warm_up[0], n_subsets=n_subsets, lambda_ratio=ratio)
    solve_batch(small, warm_up, n_subsets=n_subsets)
    yield {
        "benchmark": "recovery",
        "what": "compile or load",
        "seconds": time.perf_counter() - began,
    } | hardware()

    columns = np.concatenate(
        [
            build_columns(start, min(n, start + 1_000_000), n_subsets=n_subsets, degree=degree, seed=0)
            for start in range(0, n, 1_000_000)
        ]
    )
    y = measurements(columns, n_subsets, BATCH, noise)
    design = Design(columns, n_subsets)
    tasks: dict[str, Callable[[], Any]] = {"bare pass": lambda: bare_pass(design, y[0])}
    for ratio in LAMBDA_RATIOS:
        tasks[f"solve at {ratio} λ_max"] = lambda ratio=ratio: solve_lasso(
            columns, y[0], n_subsets=n_subsets, lambda_ratio=ratio
        )
    tasks[f"path of {len(PATH)} down to {PATH[-1]} λ_max"] = lambda: solve_path(
        columns, y[0], PATH, n_subsets=n_subsets
    )
    tasks[f"batch of {BATCH} at 0.8 λ_max"] = lambda: solve_batch(
        columns, y, n_subsets=n_subsets, lambda_ratio=0.8
    )
    seconds: dict[str, list[float]] = {name: [] for name in tasks}
    results: dict[str, Any] = {}
    for _ in range(repeats):
        for name, task in tasks.items():
            began = time.perf_counter()
            results[name] = task()
            seconds[name].append(time.perf_counter() - began)
    unit = min(seconds["bare pass"])
    for name in tasks:
        record: dict[str, Any] = {
            "benchmark": "recovery",
            "what": name,
            "seconds": min(seconds[name]),
            "seconds_median": float(np.median(seconds[name])),
            "bare_passes": min(seconds[name]) / unit,
            "repeats": repeats,
        }
        result = results[name]
        if isinstance(result, Solution):
            record |= {
                "passes": result.n_passes,
                "epochs": result.n_epochs,
                "nonzeros": len(result.indices),
                "relative_gap": result.relative_gap,
            }
        elif isinstance(result, list):
            record |= {
                "bare_passes_each": record["bare_passes"] / len(result),
                "relative_gap": max(solution.relative_gap for solution in result),
            }
        yield record | size | hardware() | {"load_1_minute": os.getloadavg()[0]}


def hardware() -> dict[str, Any]:
    """What the figures of a record depend on."""
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "threads": numba.get_num_threads(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "numba": numba.__version__,
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "unknown")


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks recovery", description=__doc__)
    parser.add_argument("--chunks", type=int, default=11_400_000)
    parser.add_argument("--subsets", type=int, default=1_000)
    parser.add_argument("--degree", type=int, default=10)
    parser.add_argument("--noise", type=float, default=0.3)
    parser.add_argument("--repeats", type=int, default=7)
    given = parser.parse_args(arguments)
    for record in run(given.chunks, given.subsets, given.degree, given.repeats, given.noise):
        emit(record)
