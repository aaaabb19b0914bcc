"""What a query costs in recovery, as a multiple of one bare pass over the columns (same kernel, same run).

The design is generated in memory: n = 11.4 M chunks, d = 10, K = 1000 (the paper's NanoChat corpus). y is
what a few dozen chunks add up to, plus noise; with `--index`, also what the operators of that index answer to
some of its own chunks. Repetitions are interleaved, so that other load on the machine falls on all
measurements alike; `bare_passes` is a ratio of minima. Next to elapsed time stands processor time, of all
threads together, which other load hardly enters. Compilation is done before, on a small design, and reported
apart.

Parts: `solves` (one query at three λ), `batch` (64 queries against single ones), `memory` (peak of a
process that maps the columns from disk), `growth` (of a pass in n), `operators`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numba
import numpy as np

from index_format.design import build_columns
from stride_cli.output import emit, note
from stride_cli.recovery import kernels
from stride_cli.recovery.lasso import Solution, solve_batch, solve_lasso
from stride_cli.recovery.problem import LassoSettings
from stride_cli.recovery.screening import Design
from tests.benchmarks._machine import machine

LAMBDA_RATIOS = (0.8, 0.1, 0.01)
BATCH = 64
SINGLES = 8  # of the batch's queries, solved one by one
GROWTH_N = (100_000, 1_000_000, 10_000_000, 100_000_000)
_SHARD = 1_000_000


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


def shared_pass(design: Design, residuals: np.ndarray) -> None:
    """The same for up to 64 residuals at once."""
    list(design.scan_batch(list(residuals), [np.inf] * len(residuals), signed=False, capacity=16))


def hardware() -> dict[str, Any]:
    """What the figures of a record depend on."""
    return {"threads": numba.get_num_threads()} | machine("numpy", "numba")


def clocks() -> tuple[float, float]:
    """Elapsed and processor seconds so far."""
    return time.perf_counter(), time.process_time()


def timed(tasks: dict[str, Callable[[], Any]], repeats: int) -> tuple[dict[str, dict], dict[str, Any]]:
    """Times of each task, run in turn, as a record's fields; and what each returned last."""
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in tasks}
    results: dict[str, Any] = {}
    for _ in range(repeats):
        for name, task in tasks.items():
            wall, cpu = clocks()
            results[name] = task()
            now = clocks()
            taken[name].append((now[0] - wall, now[1] - cpu))
    fields = {}
    for name, pairs in taken.items():
        walls, cpus = zip(*pairs, strict=True)
        fields[name] = {
            "seconds": min(walls),
            "seconds_median": float(np.median(walls)),
            "cpu_seconds": min(cpus),
            "repeats": repeats,
        }
    return fields, results


def in_passes(fields: dict[str, Any], unit: dict[str, Any], queries: int = 1) -> dict[str, float]:
    """The times in units of a bare pass, in all and for each query."""
    found = {
        "bare_passes": fields["seconds"] / unit["seconds"],
        "cpu_bare_passes": fields["cpu_seconds"] / unit["cpu_seconds"],
    }
    if queries > 1:
        found |= {f"{name}_each": value / queries for name, value in list(found.items())}
    return found


def columns_of(n: int, n_subsets: int, degree: int) -> np.ndarray:
    """(n, d) uint16: the design's columns, built piece by piece."""
    columns = np.empty((n, degree), np.uint16)
    for start in range(0, n, _SHARD):
        stop = min(n, start + _SHARD)
        columns[start:stop] = build_columns(start, stop, n_subsets=n_subsets, degree=degree, seed=0)
    return columns


def compile_all(n_subsets: int, degree: int, noise: float, *, batch: bool = True) -> None:
    small = build_columns(0, 2_000, n_subsets=n_subsets, degree=degree, seed=0)
    y = measurements(small, n_subsets, BATCH, noise)
    for ratio in LAMBDA_RATIOS:
        solve_lasso(small, y[0], LassoSettings(lambda_ratio=ratio), n_subsets=n_subsets)
    if batch and degree <= 64:
        empty = Design(small, n_subsets)
        table, steps = np.empty((n_subsets, BATCH // 4), np.uint64), np.empty(BATCH)
        kernels.rounded_kernel(y, degree, table, steps)
        out = (
            np.empty((BATCH, 1, 2), np.int32), np.empty((BATCH, 1, 2)), np.empty((BATCH, 1), np.int64),
            np.empty((BATCH, 1)), np.empty((BATCH, 1)),
        )  # fmt: skip
        bounds = np.array([0, empty.n_chunks])
        floors = np.full(BATCH, np.inf)
        kernels.scan_batch_kernel(degree)(empty.shards[0], y, table, steps, floors, False, bounds, *out)


def about(result: Any) -> dict[str, Any]:
    if isinstance(result, Solution):
        return {
            "passes": result.n_passes,
            "epochs": result.n_epochs,
            "nonzeros": len(result.indices),
            "relative_gap": result.relative_gap,
        }
    if isinstance(result, list):
        flat = [each for part in result for each in (part if isinstance(part, list) else [part])]
        return {"relative_gap": max(solution.relative_gap for solution in flat)}
    return {}


def solves(columns: np.ndarray, y: np.ndarray, n_subsets: int, repeats: int) -> Iterator[dict[str, Any]]:
    design = Design(columns, n_subsets)
    tasks: dict[str, Callable[[], Any]] = {"bare pass": lambda: bare_pass(design, y[0])}
    for ratio in LAMBDA_RATIOS:
        tasks[f"solve at {ratio} λ_max"] = lambda ratio=ratio: solve_lasso(
            columns, y[0], LassoSettings(lambda_ratio=ratio), n_subsets=n_subsets
        )
    tasks["read every column's bytes"] = lambda: columns.reshape(-1).view(np.uint64).max()
    fields, results = timed(tasks, repeats)
    for name in tasks:
        yield (
            {"what": name}
            | fields[name]
            | in_passes(fields[name], fields["bare pass"])
            | about(results[name])
        )


def batches(columns: np.ndarray, y: np.ndarray, n_subsets: int, repeats: int) -> Iterator[dict[str, Any]]:
    """64 queries at once, against 8 of them one by one, each in bare passes of one query."""
    design = Design(columns, n_subsets)
    tasks: dict[str, Callable[[], Any]] = {
        "bare pass": lambda: bare_pass(design, y[0]),
        f"bare pass for {BATCH} queries": lambda: shared_pass(design, y),
    }
    for ratio in LAMBDA_RATIOS:
        tasks[f"{SINGLES} single at {ratio} λ_max"] = lambda ratio=ratio: [
            solve_lasso(columns, row, LassoSettings(lambda_ratio=ratio), n_subsets=n_subsets)
            for row in y[:SINGLES]
        ]
        tasks[f"batch of {BATCH} at {ratio} λ_max"] = lambda ratio=ratio: solve_batch(
            columns, y, LassoSettings(lambda_ratio=ratio), n_subsets=n_subsets
        )
    fields, results = timed(tasks, repeats)
    unit = fields["bare pass"]
    single: dict[str, float] = {}
    for name in list(tasks)[1:]:
        count = SINGLES if "single" in name else BATCH
        record = {"what": name} | fields[name] | in_passes(fields[name], unit, count) | about(results[name])
        if "single" in name:
            single = record
        elif name.startswith("batch"):
            for key in ("bare_passes_each", "cpu_bare_passes_each"):
                record[f"{key}_of_single"] = record[key] / single[key]
        yield record


def memory(columns: np.ndarray, y: np.ndarray, n_subsets: int, folder: Path) -> Iterator[dict[str, Any]]:
    """Peak memory of a process that maps the columns: beyond what it held before, and beyond the map."""
    columns.tofile(folder / "columns")
    np.save(folder / "y.npy", y)
    for count, ratio in itertools.product((1, BATCH), LAMBDA_RATIOS):
        command = [sys.executable, "-m", "tests.benchmarks", "recovery", "--mapped", str(folder)]
        command += [f"--subsets={n_subsets}", f"--degree={columns.shape[1]}", f"--count={count}"]
        done = subprocess.run(
            [*command, f"--ratio={ratio}"], check=True, stdout=subprocess.PIPE, text=True, timeout=600
        )
        yield json.loads(done.stdout)


def mapped(folder: Path, n_subsets: int, degree: int, count: int, ratio: float) -> dict[str, Any]:
    """In a process of its own: see `memory`."""
    compile_all(n_subsets, degree, 0.3, batch=count > 1)
    columns = np.memmap(folder / "columns", np.uint16, "r").reshape(-1, degree)
    y = np.load(folder / "y.npy")[:count]
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = _resident("VmRSS")
    solve_batch(columns, y, LassoSettings(lambda_ratio=ratio), n_subsets=n_subsets)
    peak = _resident("VmHWM")
    return {
        "what": f"memory of {count} at {ratio} λ_max",
        "index_bytes": columns.nbytes,
        "bytes_beyond_index": peak - before - columns.nbytes,
        "bytes_before": before,
    }


def growth(columns: np.ndarray, n_subsets: int, repeats: int) -> Iterator[dict[str, Any]]:
    """A bare pass over n, with ns per chunk; the slope is a least-squares line's.

    More columns than the design has are passed over by passing over it several times: the pass, not its
    memory, is what grows.
    """
    residual, tasks = np.random.default_rng(2).normal(size=n_subsets), {}
    for n in GROWTH_N:
        times, rest = divmod(n, len(columns))
        design = Design([columns] * times + ([columns[:rest]] if rest else []), n_subsets)
        tasks[str(n)] = lambda design=design: bare_pass(design, residual)
    fields, _ = timed(tasks, repeats)
    slopes = {}
    for kind in ("", "cpu_"):
        seconds = [fields[str(n)][f"{kind}seconds"] for n in GROWTH_N]
        slopes[f"{kind}ns_per_chunk"] = float(np.polyfit(GROWTH_N, seconds, 1)[0] * 1e9)
    for n in GROWTH_N:
        each = {f"{kind}ns_per_chunk": fields[str(n)][f"{kind}seconds"] / n * 1e9 for kind in ("", "cpu_")}
        yield {"what": "pass growing in n", "axis": "n", "value": n, "n": n} | fields[str(n)] | each
    yield {"what": "slope in n"} | slopes


def operators(place: str, n: int, repeats: int) -> Iterator[dict[str, Any]]:
    """y from the operators of an index, for chunks of it: over its own design, and over n columns."""
    from stride_cli.api import Session
    from stride_cli.attribution.pipeline import additive_measurement
    from stride_cli.data.batches import ChunkReader
    from stride_cli.operators.linear_response import measure_linear_with_loss

    session = Session.open(place)
    chunks = ChunkReader(session.index)
    chosen = np.linspace(0, session.index.n_chunks - 1, 4).astype(np.int64)
    rows = [
        measure_linear_with_loss(session.steered[0], chunks.batch(np.array([chunk])))[0][0]
        for chunk in chosen
    ]
    stored = session.index.array("design/columns")
    own = np.concatenate([np.asarray(part) for part in getattr(stored, "shards", [stored])])
    y = additive_measurement(np.array(rows), np.diff(np.asarray(session.index.array("design/row_offsets"))))
    n_subsets, degree = y.shape[1], own.shape[1]
    wide = columns_of(n, n_subsets, degree)
    for name, columns in (("its own design", own), (f"{n} columns", wide)):
        design = Design(columns, n_subsets)
        tasks: dict[str, Callable[[], Any]] = {"bare": lambda design=design: bare_pass(design, y[0])}
        for ratio in LAMBDA_RATIOS:
            tasks[f"{ratio}"] = lambda ratio=ratio, columns=columns: [
                solve_lasso(columns, row, LassoSettings(lambda_ratio=ratio), n_subsets=n_subsets) for row in y
            ]
        fields, results = timed(tasks, repeats)
        for ratio in LAMBDA_RATIOS:
            yield (
                {
                    "what": f"operators' y over {name} at {ratio} λ_max",
                    "n": len(columns),
                    "n_subsets": n_subsets,
                    "degree": degree,
                    "queries": len(y),
                    "nonzeros": [len(solution.indices) for solution in results[f"{ratio}"]],
                }
                | fields[f"{ratio}"]
                | in_passes(fields[f"{ratio}"], fields["bare"], len(y))
                | about(results[f"{ratio}"])
            )


PARTS = ("solves", "batch", "memory", "growth", "operators")


def run(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    began = clocks()
    compile_all(given.subsets, given.degree, given.noise)
    now = clocks()
    yield {"what": "compile or load", "seconds": now[0] - began[0], "cpu_seconds": now[1] - began[1]}
    columns = columns_of(given.chunks, given.subsets, given.degree)
    y = measurements(columns, given.subsets, BATCH, given.noise)
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        folder = Path(name)
        for part in given.parts:
            note(part)
            if part == "solves":
                yield from solves(columns, y, given.subsets, given.repeats)
            elif part == "batch":
                yield from batches(columns, y, given.subsets, max(1, given.repeats // 3))
            elif part == "memory":
                yield from memory(columns, y, given.subsets, folder)
            elif part == "growth":
                yield from growth(columns, given.subsets, given.repeats)
            elif given.index:
                yield from operators(given.index, given.chunks, max(1, given.repeats // 3))


def _resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks recovery", description=__doc__)
    parser.add_argument("--chunks", type=int, default=11_400_000)
    parser.add_argument("--subsets", type=int, default=1_000)
    parser.add_argument("--degree", type=int, default=10)
    parser.add_argument("--noise", type=float, default=0.3)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--index", help="an index with operators, for the part `operators`")
    parser.add_argument("--folder", type=Path, help="of files that are read back (default: the system's)")
    parser.add_argument("--mapped", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--count", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--ratio", type=float, default=0.8, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.mapped:
        emit(mapped(given.mapped, given.subsets, given.degree, given.count, given.ratio))
        return
    size = {"n": given.chunks, "n_subsets": given.subsets, "degree": given.degree, "noise": given.noise}
    for record in run(given):
        emit({"benchmark": "recovery", **size} | record | hardware())
