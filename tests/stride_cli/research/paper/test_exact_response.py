"""Exact measurement against plain steered losses and the linear one; its independence of batching."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from stride_cli.operators.closed import ClosedSettings, fit_closed
from stride_cli.operators.exact_response import pearson
from stride_cli.operators.linear_response import measure_linear
from stride_cli.operators.steered_model import SteeredModel
from stride_cli.operators.store import Operators
from stride_cli.research.paper.exact_response import choose_step, measure_exact
from stride_cli.research.paper.sgd import initial_space

K = 12


def randomly_steered(
    model, names=("residual", "residual-matrix", "logit"), *, fit="sgd", scale=0.1
) -> SteeredModel:
    spaces = [
        initial_space(n, d_model=model.d_model, vocab_size=model.vocab_size, rank=4, n_buckets=32, seed=1)
        for n in names
    ]
    random = np.random.default_rng(0)
    gates = [(scale * random.standard_normal((K, space.gate_size))).astype(np.float32) for space in spaces]
    spaces = [space.requires_grad_(False) for space in spaces]
    seen = np.ones(40, dtype=np.uint8)
    return SteeredModel.of(model, Operators(spaces=spaces, gates=gates, layer=2, fit=fit, seen=seen))


def test_exact_equals_the_plain_steered_loss(model, chunks) -> None:
    steered = randomly_steered(model)
    batch = chunks.batch(np.arange(3))
    found = measure_exact(steered, batch)
    for row in range(3):
        for subset in range(K):
            hidden = model.hidden(batch.ids, 2)[row : row + 1]
            gates = [torch.from_numpy(gate[subset : subset + 1]) for gate in steered.operators.gates]
            state = hidden + steered.spaces[0](hidden, gates[0]) + steered.spaces[1](hidden, gates[1])
            final = model.continue_from(state, 2)
            logits = model.head(final) + steered.spaces[2](final, gates[2])
            both = [model.logits(model.continue_from(hidden, 2)), 15 * torch.tanh(logits / 15)]  # soft cap
            weights = batch.weights[row, 1:]
            losses = [
                -(
                    logits[0, :-1].double().log_softmax(-1).gather(-1, batch.ids[row, 1:, None])[:, 0]
                    * weights
                ).sum()
                / weights.sum()
                for logits in both
            ]
            assert found[row, subset] == pytest.approx(float(losses[0] - losses[1]), rel=1e-3, abs=2e-6)


# at the whole step of output-matrix second order is more than a twentieth
@pytest.mark.parametrize("inside, share", [("mlp-matrix", 1), ("output-matrix", 0.5), ("linear-matrix", 1)])
def test_exact_agrees_with_linear_where_blocks_are_steered_inside(model, chunks, inside, share) -> None:
    """Together with the residual stream: both act in one continuation from the first block."""
    columns = np.stack([np.random.default_rng(i).choice(K, 3, replace=False) for i in range(40)])
    settings = ClosedSettings(
        spaces=(inside, "residual-matrix", "token-logit"),
        layer=2,
        ranks={inside: 6, "residual-matrix": 6, "token-logit": 6},
    )
    operators = fit_closed(model, chunks, columns.astype(np.uint16), K, settings)
    batch = chunks.batch(np.arange(4))
    steered = SteeredModel.of(model, operators)
    step, agreement = choose_step(steered, batch, seed=0)
    assert agreement > 0.999
    operators.step = share * step
    linear, exact = measure_linear(steered, batch), measure_exact(steered, batch)
    for a, b in zip(linear, exact, strict=True):
        assert pearson(a, b) > 0.999
        assert np.linalg.norm(a - b) < 0.05 * np.linalg.norm(a)


def test_padding_other_queries_and_the_batch_size_do_not_matter(model, chunks) -> None:
    """Nor which other subsets are measured."""
    steered, subsets = randomly_steered(model), np.asarray([7, 2, 11])
    together = measure_exact(steered, chunks.batch(np.arange(4)), batch_size=5)
    linear = measure_linear(steered, chunks.batch(np.arange(4)))
    for row in range(4):
        batch = chunks.batch(np.asarray([row]))
        found = measure_exact(steered, batch, subsets=subsets, batch_size=1 + row)[0]
        np.testing.assert_allclose(found, together[row, subsets], rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(measure_linear(steered, batch)[0], linear[row], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "space",
    ["residual", "residual-matrix", "logit", "token-logit", "pair-logit", "residual-matrix+logit+pair-logit"],
)
def test_central_differences_agree_with_the_first_order_response(model, chunks, space: str) -> None:
    random = np.random.default_rng(1)
    columns = np.stack([np.sort(random.choice(K, 3, replace=False)) for _ in range(40)]).astype(np.uint16)
    ranks = {"residual": 6, "residual-matrix": 5, "logit": 4, "token-logit": 4, "pair-logit": 300}
    operators = fit_closed(
        model, chunks, columns, K, ClosedSettings(spaces=tuple(space.split("+")), layer=2, ranks=ranks)
    )
    longest = np.argsort(-chunks.lengths)  # a chunk of two tokens may have none that is scored
    batch = chunks.batch(longest[:2])
    steered = SteeredModel.of(model, operators)
    operators.step, agreement = choose_step(steered, batch, seed=0)
    assert agreement >= 0.999
    other = chunks.batch(longest[2:5])
    exact, linear = measure_exact(steered, other), measure_linear(steered, other)
    assert min(pearson(a, b) for a, b in zip(exact, linear, strict=True)) > 0.99
