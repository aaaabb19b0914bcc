from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from stride_cli.research.methods.gradients.ekfac import EKFAC
from stride_cli.research.methods.gradients.gauss_newton import gauss_newton
from stride_cli.research.methods.gradients.passes import Passes, open_capture
from tests.stride_cli.research.methods.gradients.conftest import language_task
from tests.stride_cli.research.methods.gradients.scored import scored


def _gradients(inputs, labels, weight):
    p = (inputs @ weight.T).softmax(-1)
    error = p - nn.functional.one_hot(labels, weight.shape[0])
    return torch.einsum("ni,nj->nij", error, inputs).flatten(1).double(), p.double()


def _damped(matrix, damping):
    return matrix + damping * torch.trace(matrix) / len(matrix) * torch.eye(len(matrix), dtype=matrix.dtype)


def test_one_example_is_exact(make_classifier):
    """The Fisher matrix of one token is a Kronecker product."""
    torch.manual_seed(0)
    inputs, labels = torch.randn(6, 5), torch.arange(6) % 4
    head = nn.Linear(5, 4, bias=False)
    task, queries = make_classifier(nn.Identity(), head, inputs, labels.numpy(), 1)
    gradients, p = _gradients(inputs, labels, head.weight)
    held = gradients[1:]

    fisher = gradients[:1].T @ gradients[:1]
    expected = held @ torch.linalg.solve(_damped(fisher, 0.1), gradients[:1].T)
    found = scored(EKFAC(labels="true"), task, queries)
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-3)

    spread = torch.diag(p[0]) - torch.outer(p[0], p[0])
    whole = torch.kron(spread, torch.outer(inputs[0], inputs[0]).double())
    expected = held @ torch.linalg.solve(_damped(whole, 0.1), gradients[:1].T)
    found = scored(EKFAC(draws=300), task, queries)
    np.testing.assert_allclose(found, expected.numpy(), rtol=0.25, atol=0.1)


def test_exact_where_the_eigenbasis_is(along_axes):
    """The basis diagonalises F, although F is no Kronecker product."""
    task, queries, gradients = along_axes
    fisher = gradients[:50].T @ gradients[:50] / 50
    expected = gradients[50:] @ torch.linalg.solve(_damped(fisher, 0.1), gradients[:50].T)
    found = scored(EKFAC(labels="true", batch_tokens=16), task, queries)
    np.testing.assert_allclose(found, expected.numpy(), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("draws", [1, 3])
def test_eigenvalues_are_of_other_labels_than_their_basis(nanochat_task, monkeypatch, draws):
    """Those that made the basis would look too steep along it."""
    drawn: dict[str, list[int]] = {}
    corpus = Passes.corpus

    def noted(self, chunks, visit, title, **options):
        drawn.setdefault(title, []).append(options["draw"])
        return corpus(self, chunks, visit, title, **options)

    monkeypatch.setattr(Passes, "corpus", noted)
    EKFAC(draws=draws).fit(nanochat_task)
    basis, values = drawn["EK-FAC: covariances"], drawn["EK-FAC: eigenvalues"]
    assert len(set(basis)) == len(set(values)) == draws and not set(basis) & set(values)


def test_conjugate_gradients_find_the_exact_solution(softmax):
    """Of a softmax regression, whose Gauss–Newton matrix is its Hessian."""
    method = EKFAC(solve="cg", steps=30, layers="all")
    found = scored(method, softmax.task, softmax.queries)
    gamma = 0.1 * float(method._curvatures[0][0].values.mean())
    exact = softmax.influence(softmax.ggn + gamma * torch.eye(len(softmax.ggn), dtype=torch.float64))
    np.testing.assert_allclose(found, exact, rtol=1e-3, atol=1e-3 * np.abs(exact).max())


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_products_are_those_of_all_layers_together(gpt2_task, reduction):
    """Two layers with biases, whose matrix is not block-diagonal, against Jacobians row by row."""
    task = language_task(gpt2_task.model.model, 3)
    model, chunks, capture = task.model, task.chunks, open_capture(task, r"h\.1\.mlp")
    parameters = [each for layer in capture.layers for each in (layer.module.weight, layer.module.bias)]
    dense = torch.zeros(capture.n_parameters, capture.n_parameters)
    for parameter in parameters:
        parameter.requires_grad_(True)
    for row in range(3):
        batch = chunks.batch(np.arange(row, row + 1))
        at = torch.nonzero(batch.weights[0, 1:]).flatten()
        logits = model.logits(model.continue_from(model.hidden(batch.ids, 0), 0))[0, at]
        for token in logits:
            rows = []
            for each in token:  # every layer as (n_out, n_in), its bias the last column
                own = torch.autograd.grad(each, parameters, retain_graph=True)
                pairs = zip(own[::2], own[1::2], strict=True)
                rows.append(torch.cat([torch.cat([w.T, b[:, None]], 1).flatten() for w, b in pairs]))
            jacobian, p = torch.stack(rows), token.detach().softmax(-1)
            share = 1 / len(at) if reduction == "mean" else 1.0
            dense += share * jacobian.T @ (torch.diag(p) - torch.outer(p, p)) @ jacobian
    for parameter in parameters:
        parameter.requires_grad_(False)
    vectors = torch.randn(2, capture.n_parameters, generator=torch.Generator().manual_seed(0))
    found = gauss_newton(Passes(capture, 16, reduction, seed=0), chunks, vectors)
    torch.testing.assert_close(found, vectors @ dense / 3, rtol=1e-3, atol=1e-4)
