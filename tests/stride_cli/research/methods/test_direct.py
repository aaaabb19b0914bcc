"""Single chunks read from their own gradients, against what subsets of them answer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from stride_cli.attribution.additive import additive_measurement
from stride_cli.attribution.direct_readout import chunk_influences
from stride_cli.attribution.measuring import stack_checkpoints
from stride_cli.errors import UsageError
from stride_cli.operators.closed import fit_closed
from stride_cli.operators.designs import Designs
from stride_cli.operators.linear_response import measure_linear
from stride_cli.operators.options import ClosedOptions, resolve_settings
from stride_cli.operators.steered_model import SteeredModel
from stride_cli.recovery.refinement import candidates
from stride_cli.research.methods.protocol import score_all
from stride_cli.research.methods.registry import open_method

K, DEGREE = 12, 3


def fitted(task, seed: int, **options):
    settings = resolve_settings(ClosedOptions(**options), task.model, task.index)
    design = Designs.drawn(task.n_chunks, K, DEGREE, seed)
    return design, fit_closed(task.model, task.chunks, np.asarray(design.columns), K, settings)


def matrix(design: Designs, n_chunks: int) -> np.ndarray:
    M = np.zeros((K, n_chunks))
    M[np.asarray(design.columns).T.astype(int), np.arange(n_chunks)] = 1
    return M


@pytest.mark.parametrize(
    "options",
    [{}, {"space": "logit"}, {"space": "mlp-matrix", "rank": 8}, {"space": "logit", "stability": 4.0}],
    ids=["default", "logit", "mlp-matrix", "stability 4"],
)
def test_the_measurement_of_subsets_is_the_sum_over_their_chunks(task_and_queries, options) -> None:
    """y = M w exactly: recovery and direct readout speak of the same influences, in the same unit."""
    task, queries = task_and_queries
    design, operators = fitted(task, 1, **options)
    batch = queries.batch(range(len(queries)))
    steered = SteeredModel.of(task.model, operators)
    responses = measure_linear(steered, batch)
    rows = np.arange(task.n_chunks)
    found = chunk_influences([steered], [batch], task.chunks, rows, responses, design.row_sizes).influences
    expected = additive_measurement(responses, design.row_sizes)
    np.testing.assert_allclose(
        found @ matrix(design, task.n_chunks).T, expected, atol=2e-5 * np.abs(expected).max()
    )
    assert np.abs(found.mean(axis=1)).max() < 1e-5 * np.abs(found).max()
    some = np.array([7, 2, 11])
    part = chunk_influences(
        [steered], [batch], task.chunks, some, responses, design.row_sizes, intercept=False
    ).influences
    shift = found[:, some] - part  # without an intercept no mean is taken off: the same for all chunks
    np.testing.assert_allclose(shift, shift[:, :1].repeat(3, 1), atol=1e-5 * np.abs(found).max())


def test_models_are_put_on_the_scale_of_the_first(task_and_queries) -> None:
    task, queries = task_and_queries
    (one, first), (two, second) = fitted(task, 1, space="logit"), fitted(task, 2, space="logit")
    loud = replace(second, gates=[5.0 * gate for gate in second.gates], direct_scale=5.0)
    batch = queries.batch(range(len(queries)))
    sizes = np.stack([one.row_sizes, two.row_sizes])
    models = [SteeredModel.of(task.model, operators) for operators in (first, loud)]
    raw = [measure_linear(steered, batch) for steered in models]
    stacked = stack_checkpoints(raw, sizes)
    rows = np.arange(task.n_chunks)
    found = chunk_influences(models, [batch], task.chunks, rows, stacked, sizes).influences
    each = []
    for number, (design, operators) in enumerate(((one, first), (two, second))):
        y = additive_measurement(stacked[:, number * K : (number + 1) * K], design.row_sizes)
        steered = SteeredModel.of(task.model, operators)
        own = chunk_influences([steered], [batch], task.chunks, rows, raw[0], design.row_sizes).influences
        own -= own.mean(axis=1, keepdims=True)
        predicted = own @ matrix(design, task.n_chunks).T
        each.append(own * (y.std(axis=1) / predicted.std(axis=1))[:, None])
    np.testing.assert_allclose(found, np.mean(each, axis=0), atol=1e-4 * np.abs(found).max())


def test_all_chunks_refined_are_the_direct_readout(task_and_queries) -> None:
    task, queries = task_and_queries

    def scores(spec: str) -> np.ndarray:
        method = open_method(spec)
        method.fit(task)
        return score_all(method, queries)

    few = f"stride:subsets={K},degree={DEGREE}"
    for shrink in ("true", "false"):
        refined = scores(f"{few},read={task.n_chunks},shrink={shrink},redundancy=0")
        direct = scores(f"direct:shrink={shrink}")
        direct -= direct.mean(1, keepdims=True) if shrink == "false" else 0.0
        for a, b in zip(refined, direct, strict=True):
            np.testing.assert_allclose(a / np.abs(a).max(), b / np.abs(b).max(), atol=1e-4)
    recovered, refined = (scores(f"{few},shrink=false,estimate=subsets,read={read}") for read in (0, 5))
    for a, b in zip(recovered, refined, strict=True):
        others = (a != 0) & (b != 0)
        trust = np.median(b[others] / a[others]) if others.any() else 1.0  # of what was not read
        assert 0 <= trust <= 1 + 1e-6
        assert 0 < (~np.isclose(b, trust * a, rtol=1e-4)).sum() <= 5
    assert (scores(f"{few},nonneg=true,read={task.n_chunks}") >= 0).all()


def test_operators_without_whitened_gates_are_refused(task_and_queries) -> None:
    task, queries = task_and_queries
    method = open_method("stride:space=residual,rank=6,subsets=12,degree=3,read=4")
    method.fit(task)
    with pytest.raises(UsageError, match="--read"):
        score_all(method, queries)
    with pytest.raises(UsageError, match="read is -1"):
        open_method("stride:read=-1")


def test_projections_or_shared_pairs_choose_what_is_read(task_and_queries, monkeypatch) -> None:
    """With as few subsets as here the recovery alone knows little: either finds more of what matters."""
    task, queries = task_and_queries

    def method(spec: str):
        found = open_method(f"stride:subsets={K},degree={DEGREE},shrink=false,estimate=subsets{spec}")
        found.fit(task)
        return found

    exact = np.abs(score_all(method(f",read={task.n_chunks}"), queries))
    plain, projected = method(",read=4,project=0"), method(",read=4,project=64")
    assert projected.bytes_per_chunk == pytest.approx(plain.bytes_per_chunk + 64 + 4)

    def found(scores: np.ndarray) -> float:
        """Share of the influence of the chunks whose scores are exact."""
        return float((exact * np.isclose(np.abs(scores), exact, rtol=1e-4)).sum() / exact.sum())

    by_pairs = found(score_all(plain, queries))
    # what the recovery alone would read
    monkeypatch.setattr(
        "stride_cli.recovery.refinement.candidates",
        lambda columns, solution, count, second, alone: candidates(columns, solution, count),
    )
    alone = found(score_all(plain, queries))
    assert found(score_all(projected, queries)) == pytest.approx(alone)
    monkeypatch.undo()
    assert by_pairs > alone and found(score_all(projected, queries)) > alone


def test_of_several_checkpoints_each_query_is_added_at_unit_spread(task_and_queries) -> None:
    """Over the chunks, query by query: a query that all chunks matter to does not drown the others."""
    task, queries = task_and_queries
    found = []
    for spec in (
        "direct:shrink=false,residuals=final,normalize=0",
        f"direct:shrink=false,checkpoints={task.model.path}|{task.model.path}",
    ):
        method = open_method(spec)
        method.fit(task)
        found.append(score_all(method, queries).astype(np.float64))
    one, twice = found
    np.testing.assert_allclose(twice, 2 * one / one.std(axis=1, keepdims=True), rtol=1e-3, atol=1e-3)
