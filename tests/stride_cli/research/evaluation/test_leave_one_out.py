"""Leave-one-out agreement against effects that are known."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from stride_cli.research.evaluation.leave_one_out import columns_of, measure_leave_one_out, sample_chunks
from stride_cli.training.jobs import Job, Outcome
from stride_cli.training.options import EngineOptions

N, QUERIES = 30, 5
ONE = EngineOptions(workers=1)


class NoisyTrainer:
    """loss = −Σ influence of the members + noise that depends on seed and subset."""

    digest = "noisy"
    device, peak_bytes, on_one_gpu = "cpu", 0, 1
    n_chunks = N
    at_once = 8

    def __init__(self, influence: np.ndarray, noise: float) -> None:
        self.influence, self.noise = influence, noise

    def run(self, jobs: Sequence[Job]) -> list[Outcome]:
        found = []
        for job in jobs:
            generator = np.random.default_rng([job.seed, *np.flatnonzero(~job.mask)])
            found.append(Outcome(-self.influence @ job.mask + self.noise * generator.normal(size=QUERIES)))
        return found


@pytest.fixture
def influence() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(QUERIES, N))


def test_effects_are_the_influences_and_true_scores_agree(influence: np.ndarray, tmp_path: Path) -> None:
    sample = sample_chunks(N, 12, seed=3)
    found = measure_leave_one_out(NoisyTrainer(influence, 0), sample, [1, 2], ONE, store=tmp_path)
    assert found.effects.shape == (12, 2, QUERIES)
    assert found.effects[:, 0] == pytest.approx(influence[:, sample].T)
    scores = columns_of([influence[:2], influence[2:]], sample)
    correlations, estimates = found.agreement(scores, draws=100)
    assert correlations.spearman == pytest.approx(np.ones(QUERIES))
    assert estimates["kendall"].mean == pytest.approx(1)
    _, reversed_ = found.agreement(-scores, draws=100)
    assert reversed_["spearman"].mean == pytest.approx(-1)
    _, unrelated = found.agreement(np.random.default_rng(1).normal(size=scores.shape), draws=100)
    assert unrelated["spearman"].joint.low < 0 < unrelated["spearman"].joint.high
