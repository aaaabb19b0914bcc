"""Small weights are mostly noise: what is left of them once that is allowed for.

Sums of influences over half a corpus are what retraining is compared with, and thousands of small weights of
random sign drown the few that matter. So every weight is multiplied by a factor in [0, 1] that grows with its
size, as an estimate under a heavy-tailed prior would be (sparse influences: Johnstone and Silverman, Ann.
Statist. 32, 2004); the strongest keeps its value.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from stride_cli.recovery.problem import Solution


@dataclass(frozen=True)
class Shrinkage:
    """The shrinkage of small weights.

    Attributes
    ----------
    exponent : float ≥ 1       a weight w is multiplied by (|w| / largest |w|)^(exponent − 1)
    opposing : float in [0, 1]      what a negative weight is multiplied by, too: in pre-training, what a text
                                    teaches rarely makes another one less likely
    """

    exponent: float
    opposing: float


def shrink(weights: np.ndarray, how: Shrinkage) -> np.ndarray:
    """Weights (..., n) of queries, each query's shrunk towards 0: float64, order within a sign kept."""
    values = np.asarray(weights, np.float64)
    sizes = np.abs(values)
    largest = sizes.max(axis=-1, keepdims=True, initial=0.0)
    relative = np.divide(sizes, largest, out=np.zeros_like(sizes), where=largest > 0)
    factor = relative ** (how.exponent - 1.0) * np.where(values < 0.0, how.opposing, 1.0)
    shrunk: np.ndarray = values * factor
    return shrunk


def shrink_solution(solution: Solution, how: Shrinkage | None) -> Solution:
    """Shrink a solution's weights towards the average chunk's (None: not at all); all else, the residual too,
    is still that of the problem."""
    if how is None or not len(solution.indices):
        return solution
    values = shrink(solution.values - solution.average, how) + solution.average
    return replace(solution, values=values)
