"""Leave-one-out agreement: scores of a sample of chunks against retraining without each of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from stride_cli.errors import UsageError
from stride_cli.randomness import stream
from stride_cli.research.evaluation import metrics
from stride_cli.research.evaluation.options import FEWEST_CHUNKS
from stride_cli.research.evaluation.records import estimate_record
from stride_cli.research.evaluation.resampling import Estimate, Resampler
from stride_cli.training.jobs import Job
from stride_cli.training.options import EngineOptions
from stride_cli.training.retraining import retrain

if TYPE_CHECKING:
    from stride_cli.research.evaluation.records import LooRecord
    from stride_cli.training.jobs import Trainer


@dataclass(frozen=True)
class LeaveOneOut:
    """Effects of leaving out single chunks on the queries.

    Attributes
    ----------
    chunks : (m,) int64            the sample, ascending
    effects : (m, S, Q) float64    loss without the chunk − loss with all, nats; > 0: the chunk supports
    """

    chunks: np.ndarray
    effects: np.ndarray

    def ceiling(self, *, seed: int = 0) -> float | None:
        """Estimate the best agreement that the noise between seeds allows; None with one seed."""
        return metrics.noise_ceiling(self.effects, seed=seed)

    def agreement(
        self, scores: np.ndarray, *, draws: int = 1000, seed: int = 0
    ) -> tuple[metrics.Correlations, dict[str, Estimate]]:
        """Correlate over the sampled chunks, query by query, and average with intervals.

        Parameters
        ----------
        scores : (Q, m)      of the sampled chunks, > 0 supports

        Returns
        -------
        correlations, and "spearman", "pearson", "kendall" → Estimate; its `subsets` are the chunks
        """
        measured = self.effects.mean(axis=1).T  # (Q, m)
        scores = np.asarray(scores, np.float64)
        found = metrics.correlate(scores, measured)
        resampler = Resampler(measured, draws=draws, seed=seed)
        kinds = ("spearman", "pearson", "kendall")
        return found, {kind: resampler.draw(kind, scores, getattr(found, kind)).estimate() for kind in kinds}

    def to_record(self, method: str, scores: np.ndarray, *, seed: int) -> LooRecord:
        """Make ``stride.loo/1`` of a method's scores of the sampled chunks, (Q, m)."""
        correlations, estimates = self.agreement(scores, seed=seed)
        return {
            "schema": "stride.loo/1",
            "method": method,
            "spearman": estimate_record(estimates["spearman"].joint),
            "pearson": estimate_record(estimates["pearson"].joint),
            "kendall": estimate_record(estimates["kendall"].joint),
            "chunks": len(self.chunks),
            "seeds": self.effects.shape[1],
            "queries": len(scores),
            "constant_queries": int(correlations.constant.sum()),
            "ceiling": self.ceiling(seed=seed),
        }


def sample_chunks(n_chunks: int, size: int, *, seed: int) -> np.ndarray:
    """Draw a uniform sample without replacement, ascending: (size,) int64, the same for every method.

    Raises
    ------
    UsageError      fewer than three, or more than there are
    """
    if not FEWEST_CHUNKS <= size <= n_chunks:
        raise UsageError(
            f"{size} of {n_chunks:,} chunks cannot be left out one by one (expected {FEWEST_CHUNKS} or more)",
            fix=f"try --chunks {min(20, n_chunks)}",
        )
    return np.sort(stream(seed, "leave one out").permutation(n_chunks)[:size])


def measure_leave_one_out(
    trainer: Trainer,
    chunks: np.ndarray,
    seeds: Sequence[int],
    engine: EngineOptions = EngineOptions(),
    *,
    store: Path,
) -> LeaveOneOut:
    """Retrain without each chunk, and with all, from every seed: (m + 1) · S models."""
    masks = np.ones((len(chunks) + 1, trainer.n_chunks), bool)
    masks[np.arange(len(chunks)), chunks] = False  # the last row is everything
    jobs = [Job(mask, int(seed)) for mask in masks for seed in seeds]
    outcomes = retrain(trainer, jobs, store=store, engine=engine.engine, workers=engine.workers)
    losses = np.array([outcome.losses for outcome in outcomes]).reshape(len(masks), len(seeds), -1)
    return LeaveOneOut(np.asarray(chunks, np.int64), losses[:-1] - losses[-1])


def columns_of(blocks: Iterable[np.ndarray], chunks: np.ndarray) -> np.ndarray:
    """Take the scores of some chunks from blocks of queries: (Q, m) float64."""
    return np.concatenate([block[:, chunks].astype(np.float64) for block in blocks])
