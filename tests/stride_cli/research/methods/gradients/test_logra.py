from __future__ import annotations

import numpy as np
import pytest
import torch

from stride_cli.research.methods.gradients import projection
from stride_cli.research.methods.gradients.capture import Capture
from stride_cli.research.methods.gradients.features import corpus_features
from stride_cli.research.methods.gradients.logra import LoGRA
from stride_cli.research.methods.gradients.passes import Passes
from stride_cli.research.methods.gradients.projection import TwoSided, random_projector, random_sides
from tests.stride_cli.research.methods.gradients.scored import scored


@pytest.mark.parametrize("init", ["random", "pca"])
def test_whole_space_is_empirical_fisher_influence(softmax, init):
    """With ranks no smaller than the layer the projection is a rotation."""
    gradients = softmax.gradients[: softmax.n]
    fisher = gradients.T @ gradients / softmax.n
    fisher += 0.1 * torch.trace(fisher) / len(fisher) * torch.eye(len(fisher))
    found = scored(LoGRA(rank=8, init=init, damping=0.1), softmax.task, softmax.queries)
    np.testing.assert_allclose(found, softmax.influence(fisher), rtol=2e-3, atol=2e-3)


def test_sampled_labels_give_exact_influence(softmax, left_out, agreement):
    """The Gauss–Newton matrix of softmax regression is its Hessian; the model's ridge is the damping."""
    damping = softmax.ridge / float(torch.trace(softmax.ggn) / len(softmax.ggn))
    method = LoGRA(rank=8, labels="sampled", draws=60, damping=damping)
    found = scored(method, softmax.task, softmax.queries)
    assert agreement(found, softmax.influence(softmax.hessian)) > 0.99
    assert agreement(found, left_out) > 0.9
    assert method.bytes_per_chunk == 15 * 4


def test_projections_keep_inner_products(nanochat_task, autograd, monkeypatch):
    capture = Capture(nanochat_task.model, nanochat_task.chunks.batch(np.arange(1)), layers="body")
    passes = Passes(capture, 200, "mean", 0)
    names = [f"{layer.name}.weight" for layer in capture.layers]
    chunks = [nanochat_task.chunks.chunk(row) for row in range(nanochat_task.n_chunks)]
    gradients = autograd(nanochat_task, chunks, names)
    kernel = gradients @ gradients.T
    rotated = TwoSided(random_sides(capture.layers, 64, 0, "whole", 0, torch.device("cpu")))
    features, _ = corpus_features(passes, nanochat_task, rotated, "")
    np.testing.assert_allclose(features @ features.T, kernel, rtol=1e-3, atol=1e-4)
    for kind, dense_bytes in (("dense", projection.DENSE_BYTES), ("two-sided", 0)):
        monkeypatch.setattr(projection, "DENSE_BYTES", dense_bytes)
        total = np.zeros_like(kernel)
        for number in range(60):
            projector = random_projector(capture.layers, 64, 0, "average", number, torch.device("cpu"))
            features, _ = corpus_features(passes, nanochat_task, projector, "")
            total += features @ features.T / 60
        assert np.corrcoef(total.ravel(), kernel.ravel())[0, 1] > 0.97, kind
        assert 0.9 < np.trace(total) / np.trace(kernel) < 1.1, kind
