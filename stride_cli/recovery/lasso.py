"""The Lasso that turns K measurements into weights of n chunks, with a certificate.

    min_{w, b}  ½‖y − b − M w‖² + λ‖w‖₁          (paper: eq:lasso, with b = 0)

There is no 1/K in front: scikit-learn's `alpha` is λ / K. The intercept b is not penalised; every column of M
has d ones, so that a constant offset in y would otherwise add the same amount to every correlation. Weights
are signed unless `nonneg`.

One pass over the n columns gives λ_max and the columns most correlated with y; the problem is solved over
those. How much the residual has changed bounds how much the score of a column left out can have: where that
proves the duality gap over all n small enough, as it mostly does at large λ, one pass was all. Else another
one looks for columns that violate the optimality conditions and gives the gap. Violators join, until it is
small enough. Rarely more than four passes.
"""

from __future__ import annotations

import os
from collections import deque
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np

from stride_cli import side_by_side
from stride_cli.errors import NumericalError, UsageError
from stride_cli.recovery import kernels
from stride_cli.recovery.problem import LassoSettings, Prior, Problem, Solution
from stride_cli.recovery.screening import Candidates, Design


def solve_lasso(
    columns: Any,
    y: np.ndarray,
    settings: LassoSettings = LassoSettings(),
    *,
    n_subsets: int,
    prior: Prior | None = None,
) -> Solution:
    """Weights of chunks that explain the measurements of one query, and are what was expected of most chunks.

        min_{w, c}  ½‖y − c − M w‖² + λ Σ_i ω_i |w_i − μ_i|,      ω_i = max τ / τ_i

    Parameters
    ----------
    columns : (n, d) uint16 or uint32
        Row i lists, ascending, the subsets that hold chunk i; an array, a memory map, or a sequence of such
        shards.
    y : (K,) float
        Measurements; y[k] > 0 where steering towards subset k lowers the loss (nats per scored token).
    settings : LassoSettings
        λ, what the solution may be, and how exact it has to be.
    n_subsets : int
        K.
    prior : Prior, optional
        μ and τ of every chunk; weights whose τ is 0 stay μ. Without it μ = 0, ω = 1: the Lasso of eq:lasso.

    Raises
    ------
    NumericalError     y is not finite (names the position), or the tolerance was not reached
    UsageError         shapes that do not fit
    """
    design = Design(columns, n_subsets)
    (row,) = _measurements(np.asarray(y)[None, :], design)
    problem = Problem(design, row, settings, 0, prior)
    _advance(design, [problem], settings.nonneg)
    return problem.solution()


def solve_batch(
    columns: Any, measurements: np.ndarray, settings: LassoSettings = LassoSettings(), *, n_subsets: int
) -> list[Solution]:
    """`solve_lasso` for each row of measurements (Q, K); the columns are read once for up to 64 queries.

    Each solution has the bits of the query's own `solve_lasso`.
    """
    design = Design(columns, n_subsets)
    rows = _measurements(measurements, design)
    problems = [Problem(design, row, settings, number) for number, row in enumerate(rows)]
    solutions: list[Solution] = []
    for first in range(0, len(problems), kernels.BATCH):
        part = problems[first : first + kernels.BATCH]
        _advance(design, part, settings.nonneg)
        solutions.extend(problem.solution() for problem in part)
        for problem in part:
            problem.forget()  # a few megabytes each
    return solutions


def _advance(design: Design, problems: list[Problem], nonneg: bool) -> None:
    """Pass after pass, each for all problems that need one; between passes they run side by side."""
    count = max(1, min(len(problems), os.cpu_count() or 1))
    while waiting := [problem for problem in problems if not problem.done]:
        if len(problems) == 1:
            (problem,) = problems
            floor = problem.floor()
            problem.absorb(problem.scan(floor, problem.capacity), floor)
            continue
        floors = [problem.floor() for problem in waiting]
        residuals = [problem.pool.residual for problem in waiting]
        room = max(problem.capacity for problem in waiting)
        found = design.scan_batch(residuals, floors, signed=nonneg, capacity=room)
        under_way: deque[Future[None]] = deque()
        try:
            for problem, floor in zip(waiting, floors, strict=True):
                if len(under_way) > count:  # what waits takes memory
                    under_way.popleft().result()
                absorb = partial(_absorb_and_rest, problem)
                under_way.append(side_by_side.start(absorb, next(found), floor))
        finally:
            side_by_side.settle(under_way)


def _absorb_and_rest(problem: Problem, found: Candidates, floor: float) -> None:
    problem.absorb(found, floor)
    problem.rest()


def _measurements(values: np.ndarray, design: Design) -> np.ndarray:
    values = np.asarray(values, dtype=np.float64)
    if values.ndim != 2 or values.shape[1] != design.n_subsets:
        raise UsageError(f"measurements have shape {values.shape}, expected (queries, {design.n_subsets})")
    bad = np.argwhere(~np.isfinite(values))
    if len(bad):
        query, subset = bad[0]
        raise NumericalError(
            f"measurement y[{subset}] of query {query} is {values[query, subset]}",
            fix="look at the model's and operators' dtype: half precision overflows where float32 does not",
        )
    return values
