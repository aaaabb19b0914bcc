"""Every gradient method on real classifiers: trained, saved, indexed and loaded."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from stride_cli.data.batches import ChunkReader
from stride_cli.data.example_queries import read_examples
from stride_cli.data.workspace import Workspace
from stride_cli.errors import UsageError
from stride_cli.research.methods.protocol import score_all
from stride_cli.research.methods.registry import open_method

METHODS = (
    "graddot",
    "tracin",
    "logra:rank=4",
    "logra:init=pca,rank=4,labels=sampled",
    "ekfac",
    "trackstar:rank=4",
    "trak:dim=64,damping=0.1",
    "less:dim=64",
    "source:segments=1",
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Two networks of a kind from different seeds on 40 small images, and the task of the first."""
    from stride_cli.corpus.options import BuildOptions
    from stride_cli.data.examples_index import build_classifier_index
    from stride_cli.models.classifier.directory import open_classifier
    from stride_cli.training.classifiers import ClassifierOptions, train_classifier

    found = {}

    def train(network):
        if network in found:
            return found[network]
        path = tmp_path_factory.mktemp(network)
        random = np.random.default_rng(0)
        labels = np.arange(50) % 3
        images = random.normal(size=(50, 8, 8)) + labels[:, None, None] * np.eye(8)
        np.savez(path / "images.npz", x=images, y=labels)
        for seed in (0, 1):
            options = ClassifierOptions(
                network=network,
                width=8 if network == "mlp" else 2,
                rows=40,
                holdout=10,
                epochs=3,
                checkpoints=2 if network == "logistic" else 0,
                seed=seed,
                device="cpu",
            )
            train_classifier(path / "images.npz", path / f"model{seed}", options)
        index = build_classifier_index(
            path / "images.npz",
            model_path=path / "model0",
            out=path / "index",
            options=BuildOptions(n_subsets=20, degree=2),
        )
        model = open_classifier(index, path / "model0", device="cpu")
        found[network] = (
            path,
            Workspace(index, model, ChunkReader(index), 0),
            read_examples(model, "held-out"),
        )
        return found[network]

    return train


@pytest.mark.parametrize("network", ["mlp", "resnet9"])
def test_every_method(trained, network, autograd):
    _path, task, queries = trained(network)
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


def test_models_of_other_seeds(trained):
    path, task, queries = trained("mlp")
    alone = []
    for seed in (0, 1):
        method = open_method(f"tracin:checkpoints={path}/model{seed}")
        method.fit(task)
        alone.append(score_all(method, queries))
    assert not np.allclose(*alone)
    both = open_method(f"tracin:checkpoints={path}/model0|{path}/model1,rates=1|0.5")
    both.fit(task)
    np.testing.assert_allclose(
        score_all(both, queries), alone[0] + 0.5 * alone[1], rtol=1e-4, atol=1e-4 * np.abs(alone[0]).max()
    )
    inverse = [open_method(f"ekfac:checkpoints={path}/model{seed}") for seed in (0, 1)]
    for method in (*inverse, both := open_method(f"ekfac:checkpoints={path}/model0|{path}/model1")):
        method.fit(task)
    sums = score_all(inverse[0], queries) + score_all(inverse[1], queries)
    np.testing.assert_allclose(score_all(both, queries), sums, rtol=1e-3, atol=1e-4 * np.abs(sums).max())
    trak = open_method(f"trak:checkpoints={path}/model0|{path}/model1,dim=64,damping=0.1")
    trak.fit(task)
    assert np.isfinite(score_all(trak, queries)).all()
    assert trak.bytes_per_chunk == 2 * 64 * 4 + 4


def test_tracin_goes_along_the_checkpoints_of_the_training(trained):
    path, task, queries = trained("logistic")
    found = [path / "model0", *(path / "model0" / "checkpoints").iterdir()]
    assert len(found) == 3
    scores = {}
    for name in ("tracin", "graddot", f"tracin:checkpoints={'|'.join(map(str, found))},rates=1|1|1"):
        method = open_method(name)
        method.fit(task)
        scores[name] = score_all(method, queries)
    plain, final, listed = scores.values()
    np.testing.assert_allclose(plain, listed, rtol=1e-4, atol=1e-5 * np.abs(listed).max())
    assert not np.allclose(plain, 3 * final, rtol=0.01)


def test_logistic_regression_exactly(trained):
    """Against the inverse of the Gauss–Newton matrix, which is the Hessian."""
    _, task, queries = trained("logistic")
    weight, bias = task.model.head.weight.double(), task.model.head.bias.double()
    numbers = np.concatenate([np.arange(40), [ids[0] for ids in queries.ids]])
    labels = torch.from_numpy(
        np.array([task.chunks.chunk(row)[0][1] for row in range(40)] + [ids[1] for ids in queries.ids])
    ).long()
    ids = torch.stack([torch.from_numpy(numbers.astype(np.int64)), labels], dim=1)
    inputs = task.model.inputs(ids).flatten(1).double()
    inputs = torch.cat([inputs, torch.ones(len(inputs), 1)], dim=1)
    p = (inputs @ torch.cat([weight, bias[:, None]], dim=1).T).softmax(-1)
    error = p - torch.nn.functional.one_hot(labels, p.shape[1])
    gradients = torch.einsum("ni,nj->nij", error, inputs).flatten(1)
    spread = torch.diag_embed(p[:40]) - p[:40, :, None] * p[:40, None, :]
    size = gradients.shape[1]
    ggn = torch.einsum("nij,nk,nl->ikjl", spread, inputs[:40], inputs[:40]).reshape(size, size) / 40
    ggn += 0.1 * torch.trace(ggn) / size * torch.eye(size)
    expected = (gradients[40:] @ torch.linalg.solve(ggn, gradients[:40].T)).numpy()
    least = {"logra:rank=64,labels=sampled,draws=40": 0.95, "ekfac:draws=10": 0.9}
    for spec, bound in least.items():
        method = open_method(spec)
        method.fit(task)
        found = score_all(method, queries)
        assert np.corrcoef(found.ravel(), expected.ravel())[0, 1] > bound, spec
