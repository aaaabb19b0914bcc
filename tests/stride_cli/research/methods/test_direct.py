"""Single chunks read from their own gradients, against what subsets of them answer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from stride_cli.attribution.direct import exact_products, influence_unit
from stride_cli.attribution.pipeline import additive_measurement, average_influence
from stride_cli.errors import UsageError
from stride_cli.operators.closed import fit_closed
from stride_cli.operators.designs import Designs
from stride_cli.operators.linear_response import measure_linear
from stride_cli.operators.options import ClosedOptions, resolve_settings
from stride_cli.operators.steered_model import SteeredModel
from stride_cli.research.methods.registry import open_method
from tests.stride_cli.research.methods.gradients.scored import score_all

K, DEGREE = 12, 3


def fitted(task, seed: int, **options):
    settings = resolve_settings(ClosedOptions(**options), task.model, task.index)
    design = Designs.drawn(task.n_chunks, K, DEGREE, seed)
    return design, fit_closed(task.model, task.chunks, np.asarray(design.columns), K, settings)


def matrix(design: Designs, n_chunks: int) -> np.ndarray:
    M = np.zeros((K, n_chunks))
    M[np.asarray(design.columns).T.astype(int), np.arange(n_chunks)] = 1
    return M


def influences(steered: SteeredModel, batch, task, rows: np.ndarray, sizes) -> np.ndarray:
    unit = influence_unit(steered.operators, task, sizes)
    return unit * exact_products(steered, [batch], task.chunks, rows)


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
    average = average_influence(responses, design.row_sizes)[:, None]
    found = influences(steered, batch, task, rows, design.row_sizes) - average
    expected = additive_measurement(responses, design.row_sizes)
    np.testing.assert_allclose(
        found @ matrix(design, task.n_chunks).T, expected, atol=2e-5 * np.abs(expected).max()
    )
    assert np.abs(found.mean(axis=1)).max() < 1e-5 * np.abs(found).max()
    some = np.array([7, 2, 11])
    part = influences(steered, batch, task, some, design.row_sizes)
    np.testing.assert_allclose(found[:, some] + average, part, atol=1e-5 * np.abs(found).max())


def test_models_are_put_on_the_scale_of_the_first(task_and_queries) -> None:
    """A model whose responses are five times as large has no more to say."""
    from stride_cli.attribution.options import RecoveryOptions
    from stride_cli.attribution.several import open_pipeline
    from stride_cli.recovery.problem import dense

    task, queries = task_and_queries
    (one, first), (two, second) = fitted(task, 1, space="logit"), fitted(task, 2, space="logit")
    loud = replace(second, gates=[5.0 * gate for gate in second.gates], direct_scale=5.0)
    defaults = {"measure": "linear", "intercept": True, "lambda_ratio": 0.1, "shrinkage": None}
    defaults |= {"redundancy": 0.0, "estimated_lambda_ratio": 0.1}
    designs, batch = Designs.stacked([one, two]), queries.batch(range(len(queries)))

    def found(operators) -> np.ndarray:
        models = [SteeredModel.of(task.model, own) for own in operators]
        options = RecoveryOptions(read=task.n_chunks)
        asked = open_pipeline(operators, models.__getitem__, designs, task, defaults, options)
        return dense(asked.influences(queries, [batch], asked.measure([batch])))

    usual = found([first, second])
    np.testing.assert_allclose(found([first, loud]), usual, atol=1e-4 * np.abs(usual).max())


def test_all_chunks_refined_are_the_direct_readout(task_and_queries) -> None:
    task, queries = task_and_queries

    def scores(spec: str) -> np.ndarray:
        method = open_method(spec)
        method.fit(task)
        return score_all(method, queries)

    few = f"stride:subsets={K},degree={DEGREE}"
    whole = scores(f"{few},read={task.n_chunks},redundancy=0,shrink=false")
    for a, b in zip(whole, scores("direct:shrink=false"), strict=True):
        np.testing.assert_allclose(a / np.abs(a).max(), b / np.abs(b).max(), atol=1e-4)
    # five of them: these are exact, the others are what subsets make of the rest
    for a, b in zip(scores(f"{few},estimate=subsets,read=5,shrink=false"), whole, strict=True):
        assert 5 <= np.isclose(a, b, rtol=1e-3).sum() < task.n_chunks
    # where none may be negative, the others stay as they are
    signed, found = (scores(f"{few},read=5,shrink=false{more}") for more in ("", ",nonneg=true"))
    np.testing.assert_allclose(found, np.maximum(signed, 0), atol=1e-6)


def test_operators_without_whitened_gates_are_refused(task_and_queries) -> None:
    task, queries = task_and_queries
    method = open_method("stride:space=residual,rank=6,subsets=12,degree=3,read=4")
    method.fit(task)
    with pytest.raises(UsageError, match="--read"):
        score_all(method, queries)
    with pytest.raises(UsageError, match="read is -1"):
        open_method("stride:read=-1")


def test_what_projections_say_chooses_better_than_subsets_alone(task_and_queries) -> None:
    """With as few subsets as here the recovery alone knows little."""
    task, queries = task_and_queries

    def scores(spec: str) -> np.ndarray:
        found = open_method(f"stride:subsets={K},degree={DEGREE},redundancy=0,shrink=false{spec}")
        found.fit(task)
        return score_all(found, queries)

    exact = scores(f",read={task.n_chunks},project=64")

    def found(values: np.ndarray) -> float:
        """Share of the influence of the chunks whose scores are exact."""
        size = np.abs(exact)
        return float((size * np.isclose(values, exact, rtol=1e-4)).sum() / size.sum())

    alone = open_method(f"stride:subsets={K},degree={DEGREE},project=0,read=4,shrink=false")
    alone.fit(task)
    assert found(scores(",read=4,project=512")) > found(score_all(alone, queries))
