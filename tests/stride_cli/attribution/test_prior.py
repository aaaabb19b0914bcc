"""Overlap on the scale of influence."""

from __future__ import annotations

import numpy as np
import pytest

from stride_cli.attribution.prior import Prior
from stride_cli.errors import UsageError
from stride_cli.recovery.priors import prior_parts


def test_the_prior_has_its_share_of_the_influences_spread():
    rng = np.random.default_rng(0)
    weights, similarity = np.abs(rng.normal(size=(3, 50))), rng.random((3, 50))
    parts = prior_parts(weights * 1e-5, similarity, 0.25)
    np.testing.assert_allclose(parts.std(axis=1), 0.25 * 1e-5 * weights.std(axis=1))
    np.testing.assert_allclose(parts / parts.max(axis=1, keepdims=True),
                               similarity / similarity.max(axis=1, keepdims=True))  # fmt: skip


def test_the_less_the_subsets_tell_the_more_the_prior_says():
    weights, similarity = np.array([[0.0, 1.0, 2.0]] * 3), np.array([[0.5, 0.0, 0.2]] * 3)
    full, half, none = prior_parts(weights, similarity, 1.0, np.array([1.0, 0.5, 0.0]))
    np.testing.assert_allclose(half, 2 * full)
    assert np.isfinite(none).all() and none[0] > 10 * full[0]


def test_what_opposes_is_left_alone():
    parts = prior_parts(np.array([1.0, -1.0, 0.0]), np.array([0.5, 0.5, 0.2]), 1.0)
    assert parts[1] == 0.0 and parts[0] > parts[2] > 0.0


@pytest.mark.parametrize("constant", [0.0, 0.3])
def test_no_overlap_adds_nothing(constant):
    assert not prior_parts(np.array([1.0, 0.0]), np.full(2, constant), 1.0).any()
    assert not prior_parts(np.zeros(2), np.array([0.0, 1.0]), 1.0).any()


def test_an_unknown_prior_is_refused():
    with pytest.raises(UsageError, match="bm26"):
        Prior("bm26")


def test_states_are_alike_as_their_cosines_say(open_task) -> None:
    from stride_cli.research.methods.protocol import score_all
    from stride_cli.research.methods.registry import open_method

    task, queries = open_task()
    prior = Prior("states")
    prior.fit(task)
    found = prior.similarity(queries)
    method = open_method("featsim")
    method.fit(task)
    np.testing.assert_allclose(found, np.maximum(score_all(method, queries), 0) ** 8, rtol=1e-4, atol=1e-6)
    assert found.shape == (len(queries), task.n_chunks) and found.max() <= 1.001
