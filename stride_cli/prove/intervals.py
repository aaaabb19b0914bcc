"""A mean with its interval."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

LEVEL = 0.95


@dataclass(frozen=True)
class Interval:
    """A mean with its standard error and interval."""

    mean: float
    se: float
    low: float
    high: float


def t_interval(values: np.ndarray) -> Interval:
    """Give the mean of independent values (S,) Student's t interval; NaN where S is 1."""
    from scipy.stats import t

    mean = float(np.mean(values))
    if len(values) < 2:
        return Interval(mean, np.nan, np.nan, np.nan)
    error = float(np.std(values, ddof=1)) / math.sqrt(len(values))
    reach = float(t.ppf((1 + LEVEL) / 2, len(values) - 1)) * error
    return Interval(mean, error, mean - reach, mean + reach)
