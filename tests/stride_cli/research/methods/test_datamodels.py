"""Datamodels: a planted linear effect comes back, closed forms agree, and what was fitted on is declared."""

from __future__ import annotations

import numpy as np
from sklearn.linear_model import RidgeCV

from stride_cli.data.query_set import QuerySet
from stride_cli.research.methods.datamodels import Datamodels, DsDm, RidgeRegression
from stride_cli.research.training.truth import Truth
from tests.stride_cli.research.methods.gradients.scored import score_all


def planted(
    n_rows: int, n_chunks: int, n_queries: int, *, noise: float, seed: int = 0, margins: bool = False
):
    """A truth whose losses are linear in the masks, and the effects (Q, n): five chunks for each query."""
    random = np.random.default_rng(seed)
    masks = random.random((n_rows, n_chunks)) < 0.5
    effects = np.zeros((n_queries, n_chunks))
    for row in effects:
        row[random.choice(n_chunks, 5, replace=False)] = random.choice([-1.0, 1.0, 2.0], 5)
    losses = 4 - masks @ effects.T  # influence lowers the loss
    losses = losses[:, None, :] + noise * random.standard_normal((n_rows, 3, n_queries))
    ids = [random.integers(0, 99, 6) for _ in range(n_queries)]
    queries = QuerySet(ids, [np.ones(6, np.float32)] * n_queries, [f"q{i}" for i in range(n_queries)])
    truth = Truth(
        masks=masks,
        alpha=np.full(n_rows, 0.5),
        losses=losses,
        margins=-2 * losses if margins else None,
        base_losses=np.zeros(n_queries),
        queries=queries,
        seeds=np.arange(3),
    )
    return truth, effects


def test_lasso_finds_few_effects_among_many_chunks() -> None:
    truth, effects = planted(120, 400, 2, noise=0.1)
    method = Datamodels()
    method.fit_truth(truth, seed=1)
    for scores, effect in zip(score_all(method, truth.queries), effects, strict=True):
        strongest = np.argsort(-np.abs(scores))[:5]
        assert set(strongest) == set(np.flatnonzero(effect))
        assert (np.sign(scores[strongest]) == np.sign(effect[strongest])).all()


def test_only_the_declared_rows_are_used() -> None:
    truth, _ = planted(40, 10, 2, noise=0.1)
    method = DsDm(fold=1, folds=4)
    method.fit_truth(truth, seed=5)
    scores = score_all(method, truth.queries)
    kept = ~method.used_truth_rows
    assert kept.sum() == 10
    truth.losses[kept] = 1e6  # nothing of these may have been looked at
    truth.masks[kept] = ~truth.masks[kept]
    again = DsDm(fold=1, folds=4)
    again.fit_truth(truth, seed=5)
    np.testing.assert_array_equal(score_all(again, truth.queries), scores)


def test_the_penalty_of_few_rows_is_scikit_learns() -> None:
    """Of eight rows the intercept's own leverage, 1/8 each, decides which penalty is best for many."""
    truth, _ = planted(8, 30, 60, noise=3.0)
    masks, targets = truth.masks.astype(float), truth.losses.mean(1)
    centred = masks - masks.mean(0)
    penalties = np.linalg.eigvalsh(centred @ centred.T).mean() * np.geomspace(1e-4, 1e4, 20)
    reference = RidgeCV(alphas=penalties, alpha_per_target=True).fit(masks, targets)
    assert len(set(reference.alpha_)) > 5
    found = RidgeRegression(truth.masks).coefficients(targets)
    np.testing.assert_allclose(found, reference.coef_, rtol=1e-3, atol=1e-6)
