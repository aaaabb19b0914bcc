"""Comparison of methods: the same ground and draws, failures in their place, the page."""

from __future__ import annotations

import numpy as np
import pytest

from stride_cli.errors import require_extra
from stride_cli.research.evaluation.compare import Ground, compare_methods, lds_record
from stride_cli.research.evaluation.distribution import DistributionCounter
from stride_cli.research.evaluation.metrics import predicted_response
from stride_cli.research.evaluation.scoring import Run

N, QUERIES, SUBSETS, SEEDS = 80, 12, 40, 2


@pytest.fixture(scope="module")
def planted() -> dict[str, np.ndarray]:
    """Truth made from known influences: losses = −Σ influence of members + noise of each seed."""
    generator = np.random.default_rng(0)
    influence = generator.normal(size=(QUERIES, N)) * (generator.random((QUERIES, N)) < 0.2)
    masks = generator.random((SUBSETS, N)) < 0.5
    response = predicted_response(influence, masks)  # (Q, R)
    noise = generator.normal(size=(SUBSETS, SEEDS, QUERIES)) * 0.5
    return {"influence": influence, "masks": masks, "losses": -response.T[:, None] + noise}


def run_of(scores: np.ndarray, masks: np.ndarray) -> Run:
    spread = DistributionCounter().add(scores).result()
    return Run(predicted_response(scores, masks), spread, 1.0, 2.4, 8.0, 1e6)


@pytest.fixture(scope="module")
def entries(planted):
    ground = Ground.of(planted["losses"], None, alpha=0.5)
    noise = np.random.default_rng(1).normal(size=(QUERIES, N))
    scores = {
        "exact": planted["influence"],
        "near": planted["influence"] + 0.5 * noise,
        "noise": noise,
        "reversed": -planted["influence"],
        "nothing": np.zeros((QUERIES, N)),
    }

    def run(spec: str) -> Run:
        if spec == "absent":
            raise require_extra("absent_package", "absent")
        if spec == "broken":
            raise RuntimeError("mat1 and mat2\nshapes")
        return run_of(scores[spec], planted["masks"])

    order = ["exact", "absent", "near", "broken", "noise", "reversed", "nothing"]
    return ground, {entry.method: entry for entry in compare_methods(order, ground, run, draws=200)}


def test_planted_influences_are_ordered_rightly(entries) -> None:
    ground, found = entries
    mean = {name: entry.estimates["spearman"].mean for name, entry in found.items() if entry.run}
    assert mean["exact"] > mean["near"] > mean["noise"] > mean["reversed"]
    assert mean["reversed"] == pytest.approx(-mean["exact"]) and mean["nothing"] == 0
    assert mean["exact"] == pytest.approx(ground.ceiling, abs=0.02)
    assert found["near"].difference.joint.high < 0 and found["exact"].difference is None
    assert found["near"].difference.mean == pytest.approx(mean["near"] - mean["exact"])


def test_subsets_that_a_method_was_fitted_on_do_not_judge_it(planted) -> None:
    """A method that has seen half of the truth: judged on the other half, and so is the reference then."""
    ground = Ground.of(planted["losses"], None, alpha=0.5)
    seen = np.arange(SUBSETS) < SUBSETS // 2
    honest = run_of(planted["influence"], planted["masks"])
    learnt = np.where(seen, ground.measured, np.random.default_rng(3).normal(size=ground.measured.shape))
    fitted = Run(learnt, None, 0.0, 0.0, 0.0, held_out=~seen)

    def run(spec: str) -> Run:
        return fitted if spec == "fitted" else honest

    first, second = compare_methods(["honest", "fitted"], ground, run, draws=100)
    assert first.n_subsets == SUBSETS and second.n_subsets == SUBSETS // 2
    assert abs(second.estimates["spearman"].mean) < 0.2
    on_half = Ground.of(planted["losses"][~seen], None, alpha=0.5)
    half = Run(honest.predicted[:, ~seen], None, 0.0, 0.0, 0.0)
    (expected,) = compare_methods(["honest"], on_half, lambda spec: half, draws=100)
    ahead = second.estimates["spearman"].mean - expected.estimates["spearman"].mean
    assert second.difference.mean == pytest.approx(ahead)
    assert lds_record(second, ground)["subsets"] == SUBSETS // 2
    turned = list(compare_methods(["fitted", "honest"], ground, run, draws=100))
    assert turned[1].difference.mean == pytest.approx(-ahead) and turned[1].n_subsets == SUBSETS
