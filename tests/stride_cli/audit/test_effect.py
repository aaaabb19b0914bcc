"""Losses, influences and steepness of texts, in numbers that can be checked by hand."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from stride_cli.attribution.options import RecoveryOptions
from stride_cli.attribution.several import open_pipeline
from stride_cli.audit.effect import Effect, _effect, _measure, measure_losses
from stride_cli.audit.ranking import _Logs
from stride_cli.audit.samples import Sample
from stride_cli.corpus.documents import Document
from stride_cli.data.batches import ChunkReader
from stride_cli.data.query_set import QuerySet
from stride_cli.data.workspace import Workspace
from stride_cli.operators.closed import ClosedSettings, fit_closed
from stride_cli.operators.designs import Designs
from stride_cli.operators.steered_model import SteeredModel
from stride_cli.recovery.problem import Solution
from stride_cli.training.language_trainer import query_losses
from tests.tiny_chunks import MemoryIndex

RANDOM = np.random.default_rng(0)


def solution(weights: dict[int, float]) -> Solution:
    return Solution(
        indices=np.array(sorted(weights), dtype=np.int64),
        values=np.array([weights[i] for i in sorted(weights)], dtype=np.float64),
        intercept=0.0, lambda_=1.0, lambda_max=2.0, lambda_ratio=0.5, duality_gap=0.0, relative_gap=0.0,
        n_passes=2, n_epochs=3, r_squared=0.5, residual=np.zeros(6), n_chunks=10,
    )  # fmt: skip


def sample(name: str, *lengths: int) -> Sample:
    """Rows of random tokens, all but the first of each scored."""
    ids = [RANDOM.integers(0, 61, length) for length in lengths]
    weights = [(np.arange(length) > 0).astype(np.float32) for length in lengths]
    return Sample(Document(id=name, text=name, source="benchmark", line=1), ids, weights)


def rows_of(samples: list[Sample]) -> QuerySet:
    """Every row as a query of its own."""
    ids = [row for each in samples for row in each.ids]
    weights = [row for each in samples for row in each.weights]
    return QuerySet(ids, weights, [str(number) for number in range(len(ids))])


def test_shares_are_of_all_influence_whatever_its_sign() -> None:
    found = solution({1: 2.0, 4: -1.0, 6: 0.5, 9: 3.0})
    near = pytest.approx
    assert _effect(found, np.array([6, 1, 3])) == Effect(2.5, near(2.5 / 6.5), 9, near(3.0 / 6.5))
    assert _effect(solution({3: -1.0}), np.array([3])).strongest_chunk == -1
    # of 10 chunks six have the average, chunk 3 too: they count
    found = replace(found, average=0.5)
    assert _effect(found, np.array([6, 1, 3])) == Effect(3.0, near(3.0 / 9.5), 9, near(3.0 / 9.5))
    assert _effect(replace(found, average=4.0), np.array([6, 1, 3])).strongest_chunk == -1


def test_a_text_of_several_chunks_counts_by_its_scored_tokens(model, chunks: ChunkReader) -> None:
    settings = ClosedSettings(spaces=("logit",), layer=2, ranks={"logit": 3})
    design = Designs.drawn(chunks.n_chunks, 12, 3, 1)
    operators = fit_closed(model, chunks, np.asarray(design.columns), 12, settings)
    defaults = {"measure": "linear", "intercept": True, "lambda_ratio": 0.1, "shrinkage": None}
    defaults |= {"redundancy": 0.0, "estimated_lambda_ratio": 0.1}
    workspace = Workspace(MemoryIndex(chunks.n_chunks), model, chunks, 0)
    steered = SteeredModel.of(model, operators)
    pipeline = open_pipeline(
        [operators], lambda number: steered, design, workspace, defaults, RecoveryOptions(read=0)
    )
    samples = [sample("long", 20, 20, 4), sample("short", 7), sample("two", 9, 3)]
    rows = rows_of(samples)
    each = pipeline.measure([rows.batch(np.array([number])) for number in range(len(rows))])
    share = np.array([[19, 19, 3, 0, 0, 0], [0, 0, 0, 6, 0, 0], [0, 0, 0, 0, 8, 2]], float)
    share /= share.sum(axis=1, keepdims=True)
    measured = _measure(pipeline, samples)
    responses, losses = measured.responses, measured.losses
    scale = np.abs(each.responses).max()
    np.testing.assert_allclose(responses, share @ each.responses, rtol=1e-4, atol=1e-5 * scale)
    np.testing.assert_allclose(losses, share @ each.losses, rtol=1e-5)
    np.testing.assert_allclose(list(measure_losses(model, samples)), losses, rtol=1e-5)


def test_steepness_is_what_one_more_step_costs(model) -> None:
    """Item 0 has two versions, item 1 one, item 2 none: nothing is known of it."""
    items = [sample(f"item {number}", 12) for number in range(3)]
    made = [sample(f"made {number}", 12) for number in range(3)]
    logs: Any = object.__new__(_Logs)
    logs.model, logs.before = model, None
    logs.make = SimpleNamespace(of=lambda samples, count, step: (made, np.array([0, 0, 1])))
    own, versions = (np.log(query_losses(model, rows_of(each))) for each in (items, made))
    steep = logs.steepness(items, logs.of(items, ""), 2, 1)
    wanted = [versions[:2].mean() - own[0], versions[2] - own[1], np.nan]
    np.testing.assert_allclose(steep.values, wanted, atol=1e-5)
    wanted = [np.exp(versions[:2]).mean(), np.exp(versions[2])]
    np.testing.assert_allclose(steep.losses[:2], wanted, rtol=1e-5)
    # of a fine-tuned model: how much less of its base's loss is left
    logs.before = model
    assert np.abs(logs.of(items, "")).max() == 0
