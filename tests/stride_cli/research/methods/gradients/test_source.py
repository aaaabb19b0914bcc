from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from stride_cli.data.batches import ChunkReader
from stride_cli.data.example_queries import read_examples
from stride_cli.data.workspace import Workspace
from stride_cli.models.spec import ModelSpec
from stride_cli.research.methods.gradients import source
from stride_cli.research.methods.gradients.ekfac import EKFAC
from stride_cli.research.methods.gradients.source import Source
from tests.stride_cli.research.methods.gradients.scored import scored

N, HELD = 48, 12


@pytest.mark.parametrize("times", [(3.0,), (0.5, 2.5), (20.0, 300.0, 1e6)])
@pytest.mark.parametrize("decay", [0.0, 0.01])
def test_a_quadratic_in_closed_form(along_axes, monkeypatch, times, decay):
    """Where nothing changes along the training, segments add up to (1 − exp(−t H)) H⁻¹ of the whole time; the
    eigenbasis diagonalises H."""
    task, queries, gradients = along_axes
    hessian = gradients[:50].T @ gradients[:50] / 50
    values, vectors = torch.linalg.eigh(hessian)
    values = values.clamp_min(0) + decay
    total = sum(times)
    learned = torch.where(values > 1e-9, -torch.expm1(-total * values) / values.clamp_min(1e-12), total)
    expected = gradients[50:] @ (vectors * learned) @ vectors.T @ gradients[:50].T
    monkeypatch.setattr(source, "_training", lambda task: ([None] * len(times), list(times), decay))
    found = scored(Source(segments=len(times), labels="true", batch_tokens=16), task, queries)
    np.testing.assert_allclose(found, expected.numpy(), rtol=5e-3, atol=5e-3 * float(expected.abs().max()))
    one = Source(segments=len(times), labels="true", query_bytes=1)
    np.testing.assert_allclose(scored(one, task, queries), found, rtol=1e-3, atol=1e-4 * np.abs(found).max())


@pytest.fixture(scope="module")
def regression(tmp_path_factory):
    """A softmax regression by gradient descent on all rows at once, far from its minimum; its task, and what
    leaving out each row makes of the queries' losses."""
    from stride_cli.corpus.options import BuildOptions
    from stride_cli.data.examples_index import build_classifier_index
    from stride_cli.models.classifier.classifier_recipe import read_classifier_recipe
    from stride_cli.models.classifier.directory import open_classifier
    from stride_cli.models.classifier.networks import build_network
    from stride_cli.training.classifier_loop import train_network
    from stride_cli.training.classifiers import ClassifierOptions, train_classifier

    path = tmp_path_factory.mktemp("regression")
    random = np.random.default_rng(0)
    labels = np.arange(N + HELD) % 3
    scales = 2.0 ** -np.arange(6)  # directions that are learnt one after the other
    inputs = (random.normal(size=(N + HELD, 6)) + random.normal(size=(3, 6))[labels]) * scales
    np.savez(path / "rows.npz", x=inputs[:, None, :].astype(np.float32), y=labels)
    options = ClassifierOptions(
        network="logistic",
        rows=N,
        holdout=HELD,
        epochs=30,
        batch_size=N,
        checkpoints=5,
        lr=0.02,
        device="cpu",
    )
    train_classifier(path / "rows.npz", path / "model", options)
    index = build_classifier_index(
        path / "rows.npz",
        model=path / "model",
        out=path / "index",
        options=BuildOptions(n_subsets=20, degree=2),
    )
    model = open_classifier(index, ModelSpec(path / "model", device="cpu"))
    task, queries = Workspace(index, model, ChunkReader(index), 0), read_examples(model, "held-out")
    rows = torch.stack([torch.from_numpy(task.chunks.chunk(row)[0].astype(np.int64)) for row in range(N)])
    held = torch.stack([torch.from_numpy(np.asarray(ids, np.int64)) for ids in queries.ids])
    recipe = read_classifier_recipe(path / "model")
    read, targets, asked = model.inputs(rows), rows[:, 1], model.inputs(held)

    def losses(members):
        network = build_network(recipe.network, tuple(read.shape[1:]), 3, seed=recipe.seed)
        network.requires_grad_(True)
        train_network(network, read, targets, recipe, members=np.array(members))
        with torch.no_grad():
            return nn.functional.cross_entropy(network(asked), held[:, 1], reduction="none").numpy()

    whole = losses(range(N))
    changes = np.stack([losses([row for row in range(N) if row != left]) - whole for left in range(N)], 1)
    return path, task, queries, changes


def test_what_gradient_descent_did_before_its_end(regression, agreement):
    """Leaving a row out, trained anew: segments foresee it, and better than the minimum's influence does."""
    _, task, queries, changes = regression
    found = scored(Source(draws=20), task, queries)
    minimum = scored(EKFAC(draws=20, damping=1e-4), task, queries)
    each = [
        [np.corrcoef(a, b)[0, 1] for a, b in zip(scores, changes, strict=True)] for scores in (found, minimum)
    ]
    assert np.mean(each[0]) > 0.95
    assert np.mean(each[0]) > np.mean(each[1]) + 0.02
