"""How queries are asked together, and how several models are averaged."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stride_cli.attribution import pipeline
from stride_cli.attribution.direct import Exact
from stride_cli.attribution.pipeline import Measurement, additive_measurement, queries_together
from stride_cli.attribution.several import Several, mean_solution
from stride_cli.recovery.lasso import solve_lasso
from stride_cli.recovery.problem import LassoSettings, dense
from stride_cli.recovery.ranking import rank_documents

CPU = torch.device("cpu")
SMALLEST = 1 << 29  # bytes that gradients may take of any memory


@given(
    n_chunks=st.integers(1, 10**9),
    gate_size=st.integers(1, 10**8),
    free=st.one_of(st.none(), st.integers(0, 1 << 40)),
)
def test_as_many_queries_as_memory_has_room_for(n_chunks: int, gate_size: int, free: int | None) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "available_bytes", lambda: free)
        count = queries_together(n_chunks, gate_size, CPU)
        patch.setattr(pipeline, "available_bytes", lambda: 0)
        least = queries_together(n_chunks, gate_size, CPU)
    assert 1 <= least <= count
    if count > 1:
        assert 4 * gate_size * count <= max(SMALLEST, (free or 0) // 8)
        assert n_chunks * count <= 1 << 27


def test_null_prompts_of_a_small_model_are_asked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """100 of them, cut to three lengths; of 16 GB on, with the default's gates."""
    monkeypatch.setattr(pipeline, "available_bytes", lambda: 17 << 30)
    assert queries_together(2000, 600_421, CPU) >= 300
    # of a model of 135 M parameters at all of its layers in two parts
    some = queries_together(480, 4_218_294, CPU)
    assert some >= 50
    # what else runs takes some, and changes nothing
    monkeypatch.setattr(pipeline, "available_bytes", lambda: 30 << 30)
    assert queries_together(480, 4_218_294, CPU) == some


class Answered:
    """A pipeline whose subsets answer what is given."""

    def __init__(self, responses: np.ndarray, sizes: np.ndarray | None) -> None:
        self._responses, self._sizes = responses, sizes

    def measure(self, batches: Any, **_: Any) -> Measurement:
        none = np.zeros(len(self._responses))
        y, _ = self.explained(self._responses)
        return Measurement(None, self._responses, y, none, none, 0)

    def explained(self, responses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        sizes = self._sizes
        return responses if sizes is None else additive_measurement(responses, sizes), responses[:, 0]


def measured(responses: list[np.ndarray], sizes: Any) -> Measurement:
    each = [Answered(own, None if sizes is None else sizes[number]) for number, own in enumerate(responses)]
    models = Several(
        lambda number, _: cast(Any, each[number]), len(each), cast(Any, None), cast(Any, None), 1
    )
    return models.measure([])


def drawn(seed: int, count: int, queries: int, subsets: int) -> tuple[list[np.ndarray], np.ndarray]:
    random = np.random.default_rng(seed)
    scales = np.exp(random.normal(0, 3, (count, queries, 1)))
    responses = random.normal(size=(count, queries, subsets)) * scales + random.normal(size=(count, 1, 1))
    return list(responses), random.integers(1, 9, (count, subsets))


@given(st.integers(0, 2**32 - 1), st.integers(2, 5), st.integers(1, 4), st.integers(2, 30), st.booleans())
def test_every_model_has_the_spread_of_the_first(
    seed: int, count: int, queries: int, subsets: int, intercept: bool
) -> None:
    responses, sizes = drawn(seed, count, queries, subsets)
    found = measured(responses, sizes if intercept else None)
    expected = []
    for values, own in zip(responses, sizes, strict=True):
        y = additive_measurement(values, own) if intercept else values
        first = additive_measurement(responses[0], sizes[0]) if intercept else responses[0]
        expected.append(y * (np.std(first, axis=1) / np.std(y, axis=1))[:, None])
    wanted = np.concatenate(expected, axis=1)
    np.testing.assert_allclose(found.y, wanted, rtol=1e-9, atol=1e-9 * np.abs(wanted).max() + 1e-12)
    some = found.take(np.array([0]))
    assert some.scale.shape == (count, 1) and some.responses.shape == (1, count * subsets)


def test_a_model_that_answers_nothing_says_nothing() -> None:
    (first, second), sizes = drawn(4, 2, 2, 20)
    silent = np.zeros_like(second)
    np.testing.assert_allclose(measured([first, silent], sizes).responses, np.hstack([first, silent]))
    assert not measured([silent, second], sizes).responses.any()


def test_the_mean_of_models_has_the_weakest_certificate() -> None:
    random = np.random.default_rng(0)
    columns = np.stack([np.sort(random.choice(20, 3, replace=False)) for _ in range(50)]).astype(np.uint16)
    each = [solve_lasso(columns, random.normal(size=20), n_subsets=20) for _ in range(3)]
    some = [replace(own, exact=np.array([1, n]), average=0.1 * n) for n, own in enumerate(each, 2)]
    found = mean_solution(some)
    np.testing.assert_allclose(dense([found])[0], dense(some).mean(axis=0))
    assert found.relative_gap == max(own.relative_gap for own in each) and found.exact.tolist() == [1]
    np.testing.assert_array_equal(found.residual, np.concatenate([own.residual for own in each]))
    assert mean_solution(each[:1]) is each[0]


def test_the_one_document_of_a_corpus_has_all_of_the_influence() -> None:
    columns, responses, sizes = np.zeros((1, 1), np.uint16), np.array([[0.5]]), np.ones(1)
    y, average = (put(responses, sizes) for put in (additive_measurement, pipeline.average_influence))
    measurement = Measurement(columns, responses, y, average, np.ones(1), len(columns))
    exact = Exact(np.zeros(1, np.int64), np.array([0.5]), 1.0, 0.5)
    settings = pipeline.Settings("linear", 1, LassoSettings(), 1, False, 0.0, None)
    found = pipeline.recover(measurement, None, exact, settings)
    ((hit,), opposers) = rank_documents(found, columns, np.zeros(1, np.int64), top=3, bottom=3)
    assert (hit.influence, hit.share, hit.sign, opposers) == (0.5, 1.0, "supports", [])
