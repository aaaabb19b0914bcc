from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from stride_cli.research.methods.gradients import projection
from stride_cli.research.methods.gradients.trak import TRAK
from tests.stride_cli.research.methods.gradients.scored import scored


def _margins(softmax):
    """Gradients of log(p / (1 − p)) and 1 − p, in closed form."""
    p = (softmax.inputs @ softmax.weight.T).softmax(-1)
    onehot = nn.functional.one_hot(softmax.labels, softmax.classes)
    others = p * (1 - onehot)
    pull = onehot - others / others.sum(-1, keepdim=True)
    gradients = torch.einsum("ni,nj->nij", pull, softmax.inputs).flatten(1)
    return gradients.numpy(), (1 - (p * onehot).sum(-1)).numpy()


@pytest.mark.parametrize("dense_bytes", [projection.DENSE_BYTES, 0])
def test_large_dim_is_the_unprojected_kernel(softmax, dense_bytes, monkeypatch):
    monkeypatch.setattr(projection, "DENSE_BYTES", dense_bytes)
    gradients, doubt = _margins(softmax)
    train, held = gradients[: softmax.n], gradients[softmax.n :]
    expected = held @ np.linalg.pinv(train.T @ train, rcond=1e-6) @ train.T * doubt[: softmax.n]
    found = scored(TRAK(dim=400, damping=0), softmax.task, softmax.queries)
    np.testing.assert_allclose(found, expected, rtol=1e-2, atol=2e-3 * np.abs(expected).max())


def test_several_models_are_averaged(softmax, scaled):
    method = TRAK(dim=400, damping=0, checkpoints=scaled("1", "1.0"))
    both = scored(method, softmax.task, softmax.queries)
    one = scored(TRAK(dim=400, damping=0), softmax.task, softmax.queries)
    np.testing.assert_allclose(both, one, rtol=1e-2, atol=2e-3 * np.abs(one).max())


def test_margin_gradients_of_sequences(nanochat_task, queries):
    """The kernel of one chunk with itself: ‖φ‖² in the whole space, by autograd."""
    from stride_cli.research.methods.gradients.capture import Capture
    from stride_cli.research.methods.gradients.features import corpus_features
    from stride_cli.research.methods.gradients.passes import Passes
    from stride_cli.research.methods.gradients.projection import TwoSided, random_sides

    model = nanochat_task.model
    capture = Capture(model, nanochat_task.chunks.batch(np.arange(1)), layers="all")
    projector = TwoSided(random_sides(capture.layers, 64, 0, "whole", 0, torch.device("cpu")))
    features, doubt = corpus_features(
        Passes(capture, 100, "sum", 0), nanochat_task, projector, "", output="margin"
    )
    parameters = [dict(model.model.named_parameters())[f"{layer.name}.weight"] for layer in capture.layers]
    for row in range(4):
        ids, _ = nanochat_task.chunks.chunk(row)
        for parameter in parameters:
            parameter.requires_grad_(True)
        tokens = torch.from_numpy(ids.astype(np.int64))[None]
        log_p = model.logits(model.continue_from(model.hidden(tokens, 0), 0)).log_softmax(-1)[0, :-1]
        picked = log_p.gather(-1, tokens[0, 1:, None])[:, 0]
        gradients = torch.autograd.grad((picked - torch.log1p(-picked.exp())).sum(), parameters)
        for parameter in parameters:
            parameter.requires_grad_(False)
        squares = sum(float(gradient.square().sum()) for gradient in gradients)
        assert features[row] @ features[row] == pytest.approx(squares, rel=1e-3)
        assert doubt[row] == pytest.approx(float((1 - picked.exp()).mean().detach()), rel=1e-4)
