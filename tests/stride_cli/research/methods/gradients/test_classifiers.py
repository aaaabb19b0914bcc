"""Every gradient method on real classifiers: trained, saved, indexed and loaded."""

from __future__ import annotations

import numpy as np
import pytest

from stride_cli.corpus.options import BuildOptions
from stride_cli.data.batches import ChunkReader
from stride_cli.data.example_queries import read_examples
from stride_cli.data.examples_index import build_classifier_index
from stride_cli.data.workspace import Workspace
from stride_cli.errors import UsageError
from stride_cli.models.classifier.directory import open_classifier
from stride_cli.models.spec import ModelSpec
from stride_cli.research.methods.registry import open_method
from stride_cli.training.classifiers import ClassifierOptions, train_classifier
from tests.stride_cli.research.methods.gradients.scored import score_all

METHODS = (
    *("graddot", "tracin", "logra:rank=4", "logra:init=pca,rank=4,labels=sampled", "ekfac"),
    *("trackstar:rank=4", "trak:dim=64,damping=0.1", "less:dim=64", "source:segments=1"),
)


@pytest.mark.parametrize("network", ["mlp", "resnet9"])
def test_every_method(network, autograd, tmp_path):
    random = np.random.default_rng(0)
    labels = np.arange(50) % 3
    rows = tmp_path / "images.npz"
    np.savez(rows, x=random.normal(size=(50, 8, 8)) + labels[:, None, None] * np.eye(8), y=labels)
    options = ClassifierOptions(
        network=network,
        width=8 if network == "mlp" else 2,
        rows=40,
        holdout=10,
        epochs=3,
        checkpoints=0,
        device="cpu",
    )
    train_classifier(rows, tmp_path / "model", options)
    index = build_classifier_index(
        rows, model=tmp_path / "model", out=tmp_path / "index", options=BuildOptions(n_subsets=20, degree=2)
    )
    model = open_classifier(index, ModelSpec(tmp_path / "model", device="cpu"))
    task, queries = Workspace(index, model, ChunkReader(index), 0), read_examples(model, "held-out")
    scores = {}
    for spec in METHODS:
        method = open_method(spec)
        if spec.startswith("source") and network == "resnet9":  # trained by AdamW
            with pytest.raises(UsageError, match="plain gradient descent"):
                method.fit(task)
            continue
        method.fit(task)
        scores[spec] = score_all(method, queries)
        assert scores[spec].shape == (10, 40), spec
        assert scores[spec].dtype == np.float32, spec
        assert np.isfinite(scores[spec]).all(), spec
        assert scores[spec].std() > 0, spec
    names = [name for name, parameter in task.model.model.named_parameters() if "norm" not in name]
    chunks = [task.chunks.chunk(row) for row in range(40)]
    held = autograd(task, list(zip(queries.ids, queries.weights, strict=True)), names)
    expected = held @ autograd(task, chunks, names).T
    np.testing.assert_allclose(scores["graddot"], expected, rtol=1e-3, atol=1e-4 * np.abs(expected).max())
    np.testing.assert_array_equal(scores["graddot"], scores["tracin"])
