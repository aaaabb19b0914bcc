"""STRIDE as a method among others: what it recovers, and the readout that it approaches."""

from __future__ import annotations

import numpy as np
import pytest

from stride_cli.data.query_set import QUERY_TOKENS
from stride_cli.research.methods.registry import open_method
from tests.stride_cli.research.methods.gradients.scored import score_all


def fitted(task, spec: str):
    method = open_method(spec)
    method.fit(task)
    return method


@pytest.mark.parametrize("space", ["residual-matrix", "logit", "token-logit"])
def test_recovery_from_many_subsets_is_the_direct_readout(task_and_queries, space: str) -> None:
    """With as many subsets as chunks, next to no penalty is left between measurement and readout."""
    task, queries = task_and_queries
    n = task.n_chunks
    many = fitted(task, f"stride:space={space},subsets={n},degree=3,lambda_ratio=1e-4")
    recovered, direct = (score_all(each, queries) for each in (many, fitted(task, f"direct:space={space}")))
    assert recovered.shape == direct.shape == (len(queries), n)
    centred = direct - direct.mean(1, keepdims=True)
    for a, b in zip(recovered, centred, strict=True):
        assert np.corrcoef(a, b)[0, 1] > 0.9


def test_the_direct_readout_of_the_whole_fisher_matrix(task_and_queries) -> None:
    """One operator per chunk, measured: the same as G (F + γI)⁻¹ g written out."""
    import torch

    from stride_cli.operators.bases import label_uniforms
    from stride_cli.operators.closed import fit_spaces
    from stride_cli.operators.fisher import solve_gates
    from stride_cli.operators.gradients import gate_gradients
    from stride_cli.operators.options import ClosedOptions, resolve_settings

    task, queries = task_and_queries
    found = score_all(fitted(task, "direct:space=residual,rank=6,shrink=false"), queries)
    options = ClosedOptions(space="residual", rank=6)
    settings = resolve_settings(options, task.model, task.index)
    steered = fit_spaces(task.model, task.chunks, settings)
    rows, gradients = [], []
    for chunk in range(task.n_chunks):
        batch = task.chunks.batch(np.asarray([chunk]))
        uniforms = label_uniforms(settings.seed, batch)
        true, _ = gate_gradients(steered, batch)
        drawn, _ = gate_gradients(steered, batch, sampled=uniforms)
        rows.append(drawn[0][0] * batch.scored[0].sqrt())
        gradients.append(true[0][0] * batch.scored[0] * task.n_chunks / task.chunks.scored_tokens())
    asked = gate_gradients(steered, queries.batch(range(len(queries))))[0][0]
    R = torch.stack(rows).double()
    solved = solve_gates(torch.stack(gradients), R.T @ R / len(R), damping=settings.damping)
    expected = (asked @ solved.T).numpy()
    np.testing.assert_allclose(found, expected, rtol=2e-2, atol=2e-3 * np.abs(expected).max())


def test_checkpoints_have_subsets_of_their_own_and_are_averaged(task_and_queries) -> None:
    """The same model on two designs: the mean of what each of them recovers, at the first one's spread."""
    task, queries = task_and_queries
    path = task.model.path
    # checkpoints' default
    small = "space=logit,subsets=16,degree=3,shrink=false,read=0,estimate=subsets,residuals=final,normalize=0"
    one = fitted(task, f"stride:{small}")
    first = score_all(one, queries)
    method = fitted(task, f"stride:{small},checkpoints={path}|{path}")
    found = score_all(method, queries)
    assert len(method._designs.each) == 2
    second = 2 * found - first
    second -= np.median(second, axis=1, keepdims=True)  # most chunks have no weight of their own
    batches = [queries.batch(rows) for rows in queries.groups(task.model, QUERY_TOKENS)]
    y, first = (each._pipeline().measure(batches).y for each in (method, one))
    np.testing.assert_allclose(y[:, 16:].std(1), y[:, :16].std(1), rtol=1e-9)
    np.testing.assert_allclose(y[:, :16], first, rtol=1e-6, atol=1e-12)
    M = np.zeros((16, task.n_chunks))
    M[method._designs.each[1].T.astype(int), np.arange(task.n_chunks)] = 1
    ratio = method._defaults["lambda_ratio"]
    for weights, measured in zip(second, y[:, 16:], strict=True):
        residual = measured - M @ weights
        residual -= residual.mean()
        largest = ratio * np.abs(M.T @ (measured - measured.mean())).max()
        assert np.abs(M.T @ residual).max() <= largest * (1 + 1e-2)  # optimal in the second design alone
