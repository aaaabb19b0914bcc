"""Methods that learn from retrained subsets, on an index with a real truth."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from index_format.errors import StageMissing
from index_format.reader import Index
from stride_cli.research.methods.registry import open_method
from stride_cli.research.training.options import TruthOptions
from stride_cli.research.training.truth import Truth, build_truth
from tests.stride_cli.research.methods.gradients.scored import score_all

SPECS = [
    "datamodels:folds=4",
    "dsdm:folds=4,top=20",
    "airrep:train=truth,tune=projector,folds=4,epochs=2,max_length=16",
]


@pytest.fixture
def with_truth(task_and_queries):
    """A task whose index has the truth of 12 subsets, and its queries."""
    task, queries = task_and_queries
    build_truth(task, queries, TruthOptions(n_subsets=12, alpha=0.5, workers=1))
    return replace(task, index=Index.open(task.index.path)), queries


def test_what_was_fitted_on_is_declared(with_truth) -> None:
    task, queries = with_truth
    truth = Truth.from_index(task.index)
    kept = []
    for spec in SPECS:
        method = open_method(spec)
        method.fit(task)
        scores = score_all(method, queries)
        assert scores.shape == (len(queries), task.n_chunks) and np.isfinite(scores).all()
        assert method.used_truth_rows.shape == (truth.n_subsets,)
        assert method.used_truth_rows.sum() == 9
        kept.append(~method.used_truth_rows)
    assert np.array_equal(kept[0], kept[1]) and np.array_equal(kept[1], kept[2])


@pytest.mark.parametrize("spec", SPECS)
def test_without_truth_the_error_names_the_command(spec, task_and_queries) -> None:
    with pytest.raises(StageMissing) as caught:
        open_method(spec).fit(task_and_queries[0])
    assert "stride evaluate truth" in (caught.value.fix or "")
