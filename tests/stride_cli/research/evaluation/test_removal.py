"""Top-k removal against a trainer whose losses are known in closed form."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from stride_cli.research.evaluation.options import RemovalOptions
from stride_cli.research.evaluation.ranking import document_scores, random_chunks, rank_documents, top_chunks
from stride_cli.research.evaluation.removal import measure_removal
from stride_cli.training.jobs import Job, Outcome

N, QUERIES = 40, 4


class AdditiveTrainer:
    """Training that is exactly additive: loss = 3 − Σ influence of the members + an offset of the seed."""

    digest = "additive"
    device, peak_bytes, on_one_gpu = "cpu", 0, 1
    n_chunks = N
    at_once = 4

    def __init__(self, influence: np.ndarray, *, margins: bool = False, growth: float = 0.0) -> None:
        self.influence, self.growth = influence, growth  # of influences, with the seed's number
        self.margins = margins
        self.trained = 0

    def run(self, jobs: Sequence[Job]) -> list[Outcome]:
        self.trained += len(jobs)
        found = []
        for job in jobs:
            losses = 3 - (1 + self.growth * job.seed) * self.influence @ job.mask + 0.01 * job.seed
            found.append(Outcome(losses, -losses if self.margins else None))
        return found


@pytest.fixture
def influence() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(QUERIES, N)) * 0.01


def test_removal_measures_what_was_removed(influence: np.ndarray, tmp_path: Path) -> None:
    tops = top_chunks([influence], 10)
    trainer = AdditiveTrainer(influence, growth=0.1)
    options = RemovalOptions(draws=3, workers=1)
    small, large = measure_removal(trainer, tops, [2, 10], [5, 6], options, store=tmp_path, seed=1)
    for found, k in ((small, 2), (large, 10)):
        without = [influence[query, tops[query, :k]].sum() for query in range(QUERIES)]
        expected = np.array([[1.5], [1.6]]) * without  # under seeds 5 and 6
        assert found.k == k and found.attributed == pytest.approx(expected)
        removed = random_chunks(N, k, 3, seed=1, name="removal random")
        at_random = np.mean([influence[:, r].sum(axis=1) for r in removed], axis=0)
        assert found.random == pytest.approx(np.array([[1.5], [1.6]]) * at_random)
    assert (large.attributed > small.attributed).all() and (small.attributed > 0).all()
    assert trainer.trained == 2 * (1 + 2 * (QUERIES + 3))
    advantage = large.to_record("mine", options, seed=0)["advantage"]
    assert advantage["mean"] == pytest.approx((large.attributed - large.random).mean())
    assert advantage["low"] > 0
    seeds = large.to_record("mine", options, seed=0)["advantage_seeds"]
    each = (large.attributed - large.random).mean(axis=1)
    assert seeds["se"] == pytest.approx(np.ptp(each) / 2) and seeds["low"] < advantage["mean"] < seeds["high"]
    again = list(measure_removal(trainer, tops, [2, 10], [5, 6], options, store=tmp_path, seed=1))
    assert trainer.trained == 2 * (1 + 2 * (QUERIES + 3))  # everything was kept
    assert again[1].attributed.tolist() == large.attributed.tolist()


def test_top_chunks_break_ties_by_lot() -> None:
    scores = np.array([[5.0, 0, 0, 7, 0, 0, 0, 0, 0, 0]] * 50)
    found = top_chunks([scores[:20], scores[20:]], 3, seed=1)
    assert (found[:, 0] == 3).all() and (found[:, 1] == 0).all()
    assert len(set(found[:, 2].tolist())) > 4  # not always the first of the zeros
    assert (top_chunks([scores], 3, seed=1) == found).all()
    whole = top_chunks([np.arange(6.0)[None]], 6)
    assert whole.tolist() == [[5, 4, 3, 2, 1, 0]]


def test_documents_sum_their_chunks_and_zeros_are_no_hits() -> None:
    scores = np.array([[1.0, 2.0, -0.5, 0.5, 0.0]], np.float32)
    documents = document_scores(scores, np.array([0, 0, 1, 1, 2]), 4)
    assert documents.tolist() == [[3, 0, 0, 0]]
    assert rank_documents(documents[0], 3) == [(1.0, 0, 3.0)]
    assert rank_documents(np.array([1.0, -2, 1]), 5) == [(1.5, 0, 1.0), (1.5, 2, 1.0), (3.0, 1, -2.0)]
