"""Jobs of retraining (a subset of the chunks and a seed) and their outcomes (losses on the queries)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np


@dataclass(frozen=True, eq=False)
class Job:
    """One model to train: on these chunks, from this seed.

    Attributes
    ----------
    mask : (n,) bool
    seed : int      of initial weights and order
    """

    mask: np.ndarray
    seed: int


@dataclass(frozen=True, eq=False)
class Outcome:
    """A retrained model's losses on the queries.

    Attributes
    ----------
    losses : (Q,) float64              mean nats per scored token
    margins : (Q,) float64 or None     classifiers: logit of the label − logsumexp of the others
    """

    losses: np.ndarray
    margins: np.ndarray | None = None


class Trainer(Protocol):
    """Trains models on subsets of a task's chunks; can be pickled, for it is sent to worker processes.

    Attributes
    ----------
    digest : str        SHA-256 in hex of all that decides an outcome besides mask and seed: recipe, corpus,
                        queries
    n_chunks : int      n
    at_once : int       how many jobs are trained together
    peak_bytes : int    about what that takes in memory; 0 = not known
    device : str        where a job is trained
    on_one_gpu : int    most groups of jobs that are trained side by side on a GPU, each in a process
    """

    digest: str
    at_once: int
    peak_bytes: int
    on_one_gpu: int

    @property
    def n_chunks(self) -> int: ...

    @property
    def device(self) -> str: ...

    def run(self, jobs: Sequence[Job]) -> list[Outcome]:
        """Train one model per job, on one thread.

        A job's outcome depends on the jobs beside it to rounding only; the same jobs in the same order give
        the same bits.
        """
        ...
