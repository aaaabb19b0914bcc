"""Top-k removal (sec:vision-eval): retrain without a query's k highest chunks, and without k random ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from stride_cli.errors import UsageError
from stride_cli.prove.verify_hit import t_interval
from stride_cli.research.evaluation.options import RemovalOptions
from stride_cli.research.evaluation.ranking import random_chunks
from stride_cli.research.evaluation.records import estimate_record
from stride_cli.research.evaluation.resampling import mean_records
from stride_cli.training.jobs import Job, Outcome
from stride_cli.training.retraining import retrain

if TYPE_CHECKING:
    from stride_cli.research.evaluation.records import RemovalRecord
    from stride_cli.training.jobs import Trainer


@dataclass(frozen=True)
class Removal:
    """Effects of retraining without k chunks on Q queries under S seeds.

    Attributes
    ----------
    k : int
    attributed, random : (S, Q) float64    rise of the loss, nats per scored token; > 0: the query suffers
    probability_attributed, probability_random : (S, Q) float64
        Fall of the probability: of the label for classifiers, exp(−loss), a token's, for text.
    """

    k: int
    attributed: np.ndarray
    random: np.ndarray
    probability_attributed: np.ndarray
    probability_random: np.ndarray

    def to_record(self, method: str, options: RemovalOptions, *, seed: int) -> RemovalRecord:
        """Make ``stride.removal/1``: means over queries, also of the effect beyond random chunks."""
        effects = {
            "attributed": self.attributed,
            "random": self.random,
            "advantage": self.attributed - self.random,
            "probability_attributed": self.probability_attributed,
            "probability_random": self.probability_random,
        }
        means = mean_records(
            {name: each.mean(axis=0) for name, each in effects.items()}, seed=seed, name="removal queries"
        )
        return {
            "schema": "stride.removal/1",
            "method": method,
            "k": self.k,
            **means,  # type: ignore[typeddict-item]
            "advantage_seeds": estimate_record(t_interval(effects["advantage"].mean(axis=1))),
            "queries": self.attributed.shape[1],
            "seeds": options.seeds,
            "draws": options.draws,
        }


def removal_jobs(
    tops: np.ndarray, ks: Sequence[int], n_chunks: int, seeds: Sequence[int], *, draws: int, seed: int
) -> dict[tuple[str, int, int], list[Job]]:
    """List the retraining: ("full", 0, 0), ("top", k, query), ("random", k, draw) → a job per seed.

    Raises
    ------
    UsageError      a k leaves no chunk to train on
    """
    for k in ks:
        if not 1 <= k < n_chunks:
            raise UsageError(
                f"k is {k}, and removing it from {n_chunks:,} chunks leaves nothing to train on",
                fix=f"use 1 to {n_chunks - 1:,}",
            )
    removed: dict[tuple[str, int, int], np.ndarray] = {("full", 0, 0): np.zeros(0, np.int64)}
    for k in ks:
        for query, rows in enumerate(tops):
            removed["top", k, query] = rows[:k]
        for draw, rows in enumerate(random_chunks(n_chunks, k, draws, seed=seed, name="removal random")):
            removed["random", k, draw] = rows
    jobs = {}
    for key, rows in removed.items():
        mask = np.ones(n_chunks, bool)
        mask[rows] = False
        jobs[key] = [Job(mask, int(number)) for number in seeds]
    return jobs


def measure_removal(
    trainer: Trainer,
    tops: np.ndarray,
    ks: Sequence[int],
    seeds: Sequence[int],
    options: RemovalOptions = RemovalOptions(),
    *,
    store: Path,
    seed: int = 0,
) -> Iterator[Removal]:
    """Retrain, and compare with the model on everything under the same seeds.

    Parameters
    ----------
    trainer : Trainer                whose queries are the Q of `tops`
    tops : (Q, max k) int64          each query's chunks by descending score
    seeds : of retraining, S
    options : RemovalOptions         `draws` random sets of every k, the same for all queries and methods; and
                                     where models are retrained

    Yields
    ------
    Removal      one for each k
    """
    draws = options.draws
    jobs = removal_jobs(tops, ks, trainer.n_chunks, seeds, draws=draws, seed=seed)
    flat = [job for group in jobs.values() for job in group]
    outcomes = iter(retrain(trainer, flat, store=store, engine=options.engine, workers=options.workers))
    found = {key: [next(outcomes) for _ in group] for key, group in jobs.items()}
    full = found["full", 0, 0]
    n_queries = len(tops)
    for k in ks:
        random = [_change(found["random", k, draw], full) for draw in range(draws)]
        loss_random, probability_random = np.mean(random, axis=0)  # (S, Q) each
        tops_out = [_change(found["top", k, query], full)[..., query] for query in range(n_queries)]
        loss, fall = np.stack(tops_out, axis=-1)
        yield Removal(k, loss, loss_random, fall, probability_random)


def probability(outcome: Outcome) -> np.ndarray:
    """Compute σ(margin) of the label, or exp(−loss): (Q,) float64."""
    if outcome.margins is not None:
        from scipy.special import expit

        return np.asarray(expit(outcome.margins), np.float64)
    return np.exp(-outcome.losses)


def _change(removed: Sequence[Outcome], full: Sequence[Outcome]) -> np.ndarray:
    """Compute each query's rise of loss and fall of probability under every seed: (2, S, Q)."""
    pairs = list(zip(removed, full, strict=True))
    losses = [after.losses - before.losses for after, before in pairs]
    falls = [probability(before) - probability(after) for after, before in pairs]
    return np.array([losses, falls])
