from __future__ import annotations

import numpy as np
import pytest
import torch

from stride_cli.research.methods.gradients import last_layer
from stride_cli.research.methods.gradients.last_layer import LastLayerInfluence
from stride_cli.research.methods.protocol import score_all


def _scores(method, task, queries):
    method.fit(task)
    return score_all(method, queries)


def _damping(softmax):
    return softmax.ridge / float(torch.trace(softmax.ggn) / len(softmax.ggn))


def test_softmax_regression_exactly(softmax, left_out):
    found = _scores(LastLayerInfluence(damping=_damping(softmax)), softmax.task, softmax.queries)
    np.testing.assert_allclose(found, softmax.influence(softmax.hessian), rtol=1e-3, atol=1e-3)
    # first-order: leaving an example out changes losses by about its influence over n
    for scores, changes in zip(found, left_out, strict=True):
        assert np.corrcoef(scores, changes)[0, 1] > 0.97
    assert np.median(found / softmax.n / left_out) == pytest.approx(1.0, abs=0.15)


def _head_hessian(task, reduction):
    """Gauss–Newton matrix of the head by autograd, the head alone being linear: the Hessian of the loss."""
    weight = task.model.head.weight.detach().double()
    total = torch.zeros(weight.numel(), weight.numel(), dtype=torch.float64)
    for row in range(task.n_chunks):
        ids, _ = task.chunks.chunk(row)
        tokens = torch.from_numpy(ids.astype(np.int64))[None]
        with torch.no_grad():
            states = task.model.continue_from(task.model.hidden(tokens, 0), 0)[0, :-1].double()
        labels = tokens[0, 1:]
        cap = getattr(task.model.model.config, "final_logit_softcapping", None)

        def loss(flat, states=states, labels=labels, cap=cap):
            z = states @ flat.view_as(weight).T
            p = z if cap is None else cap * torch.tanh(z / cap)
            return p, labels

        jacobian = torch.func.jacrev(lambda flat: loss(flat)[0])(weight.flatten())  # (t, V, p)
        p = loss(weight.flatten())[0].softmax(-1)
        spread = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
        found = torch.einsum("tvp,tvw,twq->pq", jacobian, spread, jacobian)
        total += found / (1 if reduction == "sum" else len(labels))
    return total / task.n_chunks


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_head_of_a_language_model_exactly(nanochat_task, queries, autograd, reduction):
    """With NanoChat's soft cap on the logits."""
    task = nanochat_task
    assert task.model.model.config.final_logit_softcapping
    hessian = _head_hessian(task, reduction).numpy()
    hessian += 0.1 * np.trace(hessian) / len(hessian) * np.eye(len(hessian))
    power = 0.0 if reduction == "sum" else 1.0
    chunks = [task.chunks.chunk(row) for row in range(task.n_chunks)]
    gradients = autograd(task, chunks, ["lm_head.weight"], power=power)
    held = autograd(task, list(zip(queries.ids, queries.weights, strict=True)), ["lm_head.weight"])
    expected = held @ np.linalg.solve(hessian, gradients.T)
    found = _scores(LastLayerInfluence(reduction=reduction, batch_tokens=40), task, queries)
    np.testing.assert_allclose(found, expected, rtol=1e-2, atol=1e-3 * np.abs(expected).max())


def test_many_labels_and_little_memory(nanochat_task, queries, monkeypatch, agreement):
    exact = _scores(LastLayerInfluence(), nanochat_task, queries)
    full = _scores(LastLayerInfluence(curvature="kronecker"), nanochat_task, queries)
    monkeypatch.setattr(last_layer, "_FULL_LABELS", 8)
    monkeypatch.setattr(last_layer, "_TOKEN_FLOATS", 100)
    diagonal = LastLayerInfluence(curvature="kronecker", query_bytes=1, batch_tokens=12)
    assert agreement(full, exact) > 0.8
    assert agreement(_scores(diagonal, nanochat_task, queries), full) > 0.8
