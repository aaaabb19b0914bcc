"""STRIDE's Lasso against solvers that a user would pick: the same problem, to the same duality gap.

    min_w ½‖y − M w‖² + λ Σ_i ω_i |w_i|      no intercept; M (K × n) has d ones in each column

ω = 1, but for the solvers whose name ends in -weighted: there 1 / ω is log-normal (σ = ½), at most 1.
Each solver runs in a process of its own. One function computes everyone's relative gap, over all n columns;
a solver's tolerance is tightened until that gap is small enough, and the time is that of the first solve that
reached it. `bare_passes` is that time over one pass of STRIDE's kernel over the columns, measured between the
solves of the same process; processor time (`cpu_…`) tells little of what else the machine does meanwhile.
Compilation is done before, on a small problem, and reported apart. Memory is the peak over that of the
process after compilation, less what the benchmark itself holds. A solver that is not installed, or fails, is
recorded as such.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from index_format.design import build_columns
from stride_cli.output import emit, note
from stride_cli.recovery.kernels import inner_products_kernel
from stride_cli.recovery.lasso import solve_lasso
from stride_cli.recovery.problem import LassoSettings, Prior
from stride_cli.recovery.screening import Design
from tests.benchmarks.recovery import LAMBDA_RATIOS, bare_pass, hardware, measurements

GAP = 1e-6
Weights = tuple[np.ndarray, np.ndarray]
Solve = Callable[[np.ndarray, float, float, float], Weights]
"""(y, λ / λ_max, λ_max, tolerance) to (indices, values) of the weights that are not zero."""


def units(name: str, n: int) -> np.ndarray:
    """1 / ω of each column, (n,)."""
    if not name.endswith("-weighted"):
        return np.ones(n)
    drawn = np.random.default_rng(5).lognormal(0.0, 0.5, n)
    return (drawn / drawn.max()).astype(np.float32).astype(np.float64)


def largest_score(columns: np.ndarray, vector: np.ndarray, unit: np.ndarray) -> float:
    """λ_max at y, and at any residual what its multiples may not exceed."""
    products = np.empty(len(columns))
    inner_products_kernel(columns, vector, products)
    return float((np.abs(products) * unit).max())


def relative_gap(
    columns: np.ndarray, y: np.ndarray, lambda_: float, weights: Weights, unit: np.ndarray
) -> float:
    """Duality gap over all columns / (½‖y‖²), at the best feasible multiple of the residual."""
    indices, values = weights
    residual = y.copy()
    np.subtract.at(residual, columns[indices], values[:, None])
    largest = largest_score(columns, residual, unit)
    squares, product = float(residual @ residual), float(y @ residual)
    scale = min(max(product / squares, 0.0), lambda_ / largest) if squares and largest else 0.0
    objective = 0.5 * squares + lambda_ * float((np.abs(values) / unit[indices]).sum())
    return (objective - scale * product + 0.5 * scale * scale * squares) / (0.5 * float(y @ y))


def stride(columns: np.ndarray, n_subsets: int) -> Solve:
    def solve(y: np.ndarray, ratio: float, lambda_max: float, tolerance: float) -> Weights:
        found = solve_lasso(
            columns,
            y,
            LassoSettings(lambda_ratio=ratio, intercept=False, tolerance=tolerance),
            n_subsets=n_subsets,
        )
        return found.indices, found.values

    return solve


def stride_weighted(columns: np.ndarray, n_subsets: int) -> Solve:
    prior = Prior(np.zeros(len(columns)), units("-weighted", len(columns)))

    def solve(y: np.ndarray, ratio: float, lambda_max: float, tolerance: float) -> Weights:
        settings = LassoSettings(lambda_ratio=ratio, intercept=False, tolerance=tolerance)
        found = solve_lasso(columns, y, settings, n_subsets=n_subsets, prior=prior)
        return found.indices, found.values

    return solve


def celer_weighted(columns: np.ndarray, n_subsets: int) -> Solve:
    from celer import Lasso

    weights = 1.0 / units("-weighted", len(columns))
    return _estimator(
        sparse(columns, n_subsets),
        lambda alpha, tolerance: Lasso(alpha, fit_intercept=False, tol=tolerance, weights=weights),
    )


def scikit_learn(columns: np.ndarray, n_subsets: int) -> Solve:
    from sklearn.linear_model import Lasso

    return _estimator(
        sparse(columns, n_subsets),
        lambda alpha, tolerance: Lasso(alpha, fit_intercept=False, tol=tolerance, max_iter=100_000),
    )


def celer(columns: np.ndarray, n_subsets: int) -> Solve:
    from celer import Lasso

    return _estimator(
        sparse(columns, n_subsets), lambda alpha, tolerance: Lasso(alpha, fit_intercept=False, tol=tolerance)
    )


def skglm(columns: np.ndarray, n_subsets: int) -> Solve:
    from skglm import Lasso

    # its tolerance is one on the optimality conditions, whose unit is that of alpha
    return _estimator(
        sparse(columns, n_subsets),
        lambda alpha, tolerance: Lasso(alpha, fit_intercept=False, tol=alpha * min(0.1, 1e5 * tolerance)),
    )


def glmnet(columns: np.ndarray, n_subsets: int) -> Solve:
    from glmnet import ElasticNet

    return _estimator(
        sparse(columns, n_subsets),
        lambda alpha, tolerance: ElasticNet(
            alpha=1, lambda_path=np.array([alpha]), standardize=False, fit_intercept=False, n_splits=0,
            tol=tolerance, max_iter=1_000_000,
        ),
    )  # fmt: skip


def adelie(columns: np.ndarray, n_subsets: int) -> Solve:
    import adelie

    matrix = adelie.matrix.sparse(sparse(columns, n_subsets), method="naive")

    def solve(y: np.ndarray, ratio: float, lambda_max: float, tolerance: float) -> Weights:
        state = adelie.grpnet(
            matrix, adelie.glm.gaussian(y), intercept=False,
            lmda_path=np.array([ratio * lambda_max / n_subsets]),
            tol=tolerance, early_exit=False, progress_bar=False,
        )  # fmt: skip
        coefficients = state.betas[-1]
        return coefficients.indices.astype(np.int64), coefficients.data

    return solve


# by name: the package to import, the function, and tolerances to try, in the solver's own unit
SOLVERS: dict[str, tuple[str, Callable[[np.ndarray, int], Solve], tuple[float, ...]]] = {
    "stride": ("numba", stride, (GAP,)),
    "stride-weighted": ("numba", stride_weighted, (GAP,)),
    "celer-weighted": ("celer", celer_weighted, (5e-7, 1e-7, 1e-8)),
    "scikit-learn": ("sklearn", scikit_learn, (5e-7, 1e-7, 1e-8)),
    "celer": ("celer", celer, (5e-7, 1e-7, 1e-8)),
    "skglm": ("skglm", skglm, (1e-6, 1e-7, 1e-8, 1e-9, 1e-10)),
    "python-glmnet": ("glmnet", glmnet, (1e-6, 1e-8, 1e-10, 1e-12)),
    "adelie": ("adelie", adelie, (1e-6, 1e-8, 1e-10, 1e-12)),
}


def sparse(columns: np.ndarray, n_subsets: int) -> Any:
    """M as scipy's CSC, float64, with 32-bit indices where they do."""
    from scipy.sparse import csc_matrix

    n, degree = columns.shape
    kind = np.int32 if n * degree < 2**31 else np.int64
    starts = np.arange(0, n * degree + 1, degree, dtype=kind)
    return csc_matrix((np.ones(n * degree), columns.ravel().astype(kind), starts), shape=(n_subsets, n))


def _estimator(matrix: Any, make: Callable[[float, float], Any]) -> Solve:
    def solve(y: np.ndarray, ratio: float, lambda_max: float, tolerance: float) -> Weights:
        fitted = make(ratio * lambda_max / len(y), tolerance).fit(matrix, y)
        coefficients = np.asarray(fitted.coef_ if hasattr(fitted, "coef_") else fitted.coef_path_).ravel()
        indices = np.flatnonzero(coefficients)
        return indices, coefficients[indices]

    return solve


def run(name: str, n: int, n_subsets: int, degree: int, noise: float, repeats: int) -> Iterator[dict]:
    """The records of one solver, in this process."""
    package, make, tolerances = SOLVERS[name]
    about = {"benchmark": "solvers", "solver": name, "n": n, "n_subsets": n_subsets, "degree": degree}
    try:
        importlib.import_module(package)
    except Exception as error:  # one that is there but cannot be imported is as good as missing
        yield about | {"missing": f"{type(error).__name__}: {error}"}
        return
    distribution = {"stride": "numba", "stride-weighted": "numba", "celer-weighted": "celer"}.get(name, name)
    about |= {"noise": noise, "version": f"{distribution} {importlib.metadata.version(distribution)}"}
    warnings.simplefilter("ignore")  # of convergence: the gap tells

    began = time.perf_counter(), time.process_time()
    small = build_columns(0, 2_000, n_subsets=n_subsets, degree=degree, seed=0)
    y = measurements(small, n_subsets, 1, noise)[0]
    for ratio in LAMBDA_RATIOS:
        make(small, n_subsets)(y, ratio, largest_score(small, y, units(name, len(small))), tolerances[0])
    about |= {
        "compile_seconds": time.perf_counter() - began[0],
        "compile_cpu_seconds": time.process_time() - began[1],
    }
    bare_pass(Design(small, n_subsets), y)
    before = _resident("VmRSS")

    columns = build_columns(0, n, n_subsets=n_subsets, degree=degree, seed=0)
    y = measurements(columns, n_subsets, 1, noise)[0]
    unit = units(name, n)
    lambda_max = largest_score(columns, y, unit)
    design = Design(columns, n_subsets)
    solve = make(columns, n_subsets)
    held = before if name.startswith("stride") else before + columns.nbytes
    passes: list[tuple[float, float]] = []
    records = []
    for ratio in LAMBDA_RATIOS:
        found: dict[str, Any] = {}
        for tolerance in tolerances:
            _reset_peak()  # the benchmark's own arrays, between solves, do not count
            try:
                taken, weights = _timed(lambda t=tolerance: solve(y, ratio, lambda_max, t))  # noqa: B023
            except Exception as error:
                found = {"failed": f"{type(error).__name__}: {error}"}
                break
            peak = _resident("VmHWM")
            gap = relative_gap(columns, y, ratio * lambda_max, weights, unit)
            found = {"tolerance": tolerance, "relative_gap": gap, "nonzeros": len(weights[0])}
            if gap <= GAP:
                break
        if "failed" not in found:
            again = [taken]
            for _ in range(repeats - 1):
                passes.append(_timed(lambda: bare_pass(design, y))[0])
                again.append(_timed(lambda t=tolerance: solve(y, ratio, lambda_max, t))[0])  # noqa: B023
            passes.append(_timed(lambda: bare_pass(design, y))[0])
            found |= {
                "reached": found["relative_gap"] <= GAP,
                "seconds": min(wall for wall, _ in again),
                "cpu_seconds": min(cpu for _, cpu in again),
                "memory_bytes": peak - held,
            }
        records.append({"lambda_ratio": ratio} | found)
    # a process of its own keeps other solvers' loads out, not those of the machine: the quickest pass counts
    wall, cpu = min(w for w, _ in passes), min(c for _, c in passes)
    for record in records:
        if "seconds" in record:
            record["bare_passes"] = record["seconds"] / wall
            record["cpu_bare_passes"] = record["cpu_seconds"] / cpu
        yield about | record | {"bare_pass_seconds": wall, "bare_pass_cpu_seconds": cpu} | hardware()


def _timed(task: Callable[[], Any]) -> tuple[tuple[float, float], Any]:
    """(wall, processor) seconds, and the result."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = task()
    return (time.perf_counter() - wall, time.process_time() - cpu), result


def _resident(name: str) -> int:
    """VmRSS or VmHWM of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def _reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks solvers", description=__doc__)
    parser.add_argument("--chunks", type=int, nargs="+", default=[100_000, 1_000_000])
    parser.add_argument("--subsets", type=int, default=1_000)
    parser.add_argument("--degree", type=int, default=10)
    parser.add_argument("--noise", type=float, default=0.3)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--solvers", nargs="+", choices=SOLVERS, default=list(SOLVERS))
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for one solver at one n")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.here:
        for record in run(
            given.solvers[0], given.chunks[0], given.subsets, given.degree, given.noise, given.repeats
        ):
            emit(record)
        return
    for n in given.chunks:
        ours: dict[tuple[float | None, bool], dict[str, Any]] = {}
        for name in sorted(given.solvers, key=lambda name: not name.startswith("stride")):
            for record in _apart(name, n, given):
                problem = record.get("lambda_ratio"), name.endswith("-weighted")
                if name.startswith("stride") and "seconds" in record:
                    ours[problem] = record
                elif "seconds" in record and (reference := ours.get(problem)):
                    record |= {
                        f"{what}_over_stride": record[what] / reference[what]
                        for what in ("seconds", "cpu_seconds", "memory_bytes")
                    }
                emit(record)


def _apart(name: str, n: int, given: argparse.Namespace) -> list[dict[str, Any]]:
    note(f"{name} at n = {n:,}")
    options = {"chunks": n, "subsets": given.subsets, "degree": given.degree, "noise": given.noise}
    flags = [f"--{key}={value}" for key, value in options.items()]
    command = [sys.executable, "-m", "tests.benchmarks", "solvers", "--here", "--solvers", name, *flags]
    failed = {"benchmark": "solvers", "solver": name, "n": n, "n_subsets": given.subsets}
    try:
        done = subprocess.run(
            [*command, f"--repeats={given.repeats}"], stdout=subprocess.PIPE, text=True, timeout=given.limit
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return [failed | {"failed": f"not done within {given.limit:.0f} s"}]
    if done.returncode:
        return [failed | {"failed": f"exit status {done.returncode}"}]
    return [json.loads(line) for line in done.stdout.splitlines()]
