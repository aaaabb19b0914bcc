"""Exact measurement against plain steered losses and the linear one; its independence of batching."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from stride_cli.attribution.additive import additive_measurement
from stride_cli.data.batches import pad_batch
from stride_cli.errors import QueryError
from stride_cli.operators import exact_response, steered_model
from stride_cli.operators import linear_response as linear
from stride_cli.operators.closed import ClosedSettings, fit_closed
from stride_cli.operators.exact_response import MOST_STEPS, choose_step, measure_exact, pearson
from stride_cli.operators.linear_response import measure_linear
from stride_cli.operators.steered_model import SteeredModel
from stride_cli.operators.store import Operators
from stride_cli.randomness import stream
from stride_cli.research.paper.initial_bases import initial_space

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


@pytest.mark.parametrize("fit", ["sgd", "closed"])
def test_blocks_are_not_run_again_where_only_logits_are_steered(model, chunks, monkeypatch, fit: str) -> None:
    steered = randomly_steered(model, ("logit", "token-logit"), fit=fit)
    batch = chunks.batch(np.arange(3))
    runs = {"hidden": 0, "continue_from": 0, "uncapped_logits": 0}
    for name in runs:
        plain = getattr(model, name)

        def counted(*args, name=name, plain=plain):
            runs[name] += 1
            return plain(*args)

        monkeypatch.setattr(model, name, counted)
    found = measure_exact(steered, batch, batch_size=4)
    assert runs == {"hidden": 2 * 3, "continue_from": 3, "uncapped_logits": 3}  # state, embeddings
    monkeypatch.undo()
    for row in range(3):
        hidden = model.hidden(batch.ids[row : row + 1], 2)
        final, inputs = model.continue_from(hidden, 2), model.hidden(batch.ids[row : row + 1], 0)
        weights = batch.weights[row, 1:].double()

        def loss(gates, final=final, inputs=inputs, weights=weights, row=row):
            shifts = steered.spaces[0](final, gates[0]) + steered.spaces[1](inputs, gates[1])
            logits = 15 * torch.tanh((model.head(final) + shifts) / 15)
            chosen = logits[0, :-1].double().log_softmax(-1)
            return float(-(chosen.gather(-1, batch.ids[row, 1:, None])[:, 0] * weights).sum() / weights.sum())

        for subset in range(K):
            gates = [torch.from_numpy(gate[subset : subset + 1]) for gate in steered.operators.gates]
            still = [0 * gate for gate in gates]
            expected = loss(still) - loss(gates)
            if fit == "closed":
                step = steered.operators.step
                moved = [loss([sign * step * gate for gate in gates]) for sign in (-1, 1)]
                expected = (moved[0] - moved[1]) / (2 * step)
            assert found[row, subset] == pytest.approx(expected, rel=1e-3, abs=2e-6)


def test_the_prefix_is_run_once_a_query(model, chunks, monkeypatch) -> None:
    """Blocks below the layer run once; those above once a batch of subsets; the head at scored positions."""
    steered = randomly_steered(model)
    batch = chunks.batch(np.arange(2))
    seen: dict[str, list[int]] = {"hidden": [], "continue_from": [], "uncapped_logits": []}
    for name in seen:
        plain = getattr(model, name)

        def counted(values, *args, name=name, plain=plain):
            seen[name].append(values.shape[1])
            return plain(values, *args)

        monkeypatch.setattr(model, name, counted)
    measure_exact(steered, batch, batch_size=4)
    assert len(seen["hidden"]) == 2
    assert len(seen["continue_from"]) == 2 * (1 + K // 4)  # one unsteered
    scored = [int(count) for count in batch.scored]
    assert sorted(seen["uncapped_logits"]) == sorted(scored * (1 + K // 4))


@pytest.mark.parametrize("inside", ["mlp-matrix", "linear-matrix"])
def test_exact_agrees_with_linear_where_blocks_are_steered_inside(model, chunks, inside: str) -> None:
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
    operators.step, agreement = choose_step(steered, batch, seed=0)
    assert agreement > 0.999
    linear, exact = measure_linear(steered, batch), measure_exact(steered, batch)
    for a, b in zip(linear, exact, strict=True):
        assert pearson(a, b) > 0.999
        assert np.linalg.norm(a - b) < 0.05 * np.linalg.norm(a)


def test_zero_gates_change_nothing(model, chunks) -> None:
    steered = randomly_steered(model, scale=0.0)
    assert np.abs(measure_exact(steered, chunks.batch(np.arange(2)))).max() < 1e-6


@pytest.mark.parametrize("batch_size", [1, 5, 64])
def test_y_does_not_depend_on_the_batch_size(model, chunks, batch_size: int) -> None:
    steered = randomly_steered(model)
    batch = chunks.batch(np.arange(2))
    reference = measure_exact(steered, batch, batch_size=8)
    found = measure_exact(steered, batch, batch_size=batch_size)
    np.testing.assert_allclose(found, reference, rtol=1e-4, atol=1e-6)


def test_queries_go_through_the_model_in_parts_where_memory_asks_for_it(model, chunks, monkeypatch) -> None:
    steered = randomly_steered(model, ("residual-matrix", "logit"), fit="closed")
    batch = chunks.batch(np.arange(5))
    whole = measure_linear(steered, batch)
    rows = []
    plain = linear.gate_gradients

    def counted(*given):
        rows.append(len(given[1].ids))
        return plain(*given)

    monkeypatch.setattr(linear, "gate_gradients", counted)
    monkeypatch.setattr(steered_model, "tokens_at_once", lambda *given: 2 * batch.ids.shape[1] + 1)
    np.testing.assert_allclose(measure_linear(steered, batch), whole, rtol=1e-5, atol=1e-9)
    assert rows == [2, 2, 1]


def test_padding_and_other_queries_do_not_matter(model, chunks) -> None:
    steered = randomly_steered(model)
    together = measure_exact(steered, chunks.batch(np.arange(4)))
    linear = measure_linear(steered, chunks.batch(np.arange(4)))
    for row in range(4):
        batch = chunks.batch(np.asarray([row]))
        np.testing.assert_allclose(measure_exact(steered, batch)[0], together[row], rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(measure_linear(steered, batch)[0], linear[row], rtol=1e-4, atol=1e-6)


def test_chosen_subsets_are_columns_of_the_whole(model, chunks) -> None:
    steered = randomly_steered(model)
    batch = chunks.batch(np.arange(2))
    chosen = np.asarray([7, 2, 11])
    found = measure_exact(steered, batch, subsets=chosen)
    np.testing.assert_allclose(found, measure_exact(steered, batch)[:, chosen], rtol=1e-4, atol=1e-6)


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


def test_where_no_step_agrees_each_is_measured_once(model, chunks, monkeypatch) -> None:
    random, measured = np.random.default_rng(0), {}

    def noise(steered, batch, *, subsets, batch_size):
        key = steered.operators.step, int(batch.rows[0])
        assert key not in measured
        measured[key] = random.standard_normal((1, len(subsets)))
        return measured[key]

    monkeypatch.setattr(exact_response, "measure_exact", noise)
    steered = randomly_steered(model, fit="closed")
    before = steered.operators.step
    batch = chunks.batch(np.arange(2))
    step, agreement = choose_step(steered, batch, seed=0)
    assert steered.operators.step == before and agreement < 0.999
    # of all that were measured on both probes, the best
    chosen = np.sort(stream(0, "step probes").permutation(steered.operators.n_subsets)[:24])
    linear = measure_linear(steered, batch)[:, chosen]
    found = {
        each: [pearson(linear[row], measured[each, row][0]) for row in range(2) if (each, row) in measured]
        for each in {each for each, _ in measured}
    }
    whole = {each: min(own) for each, own in found.items() if len(own) == 2}
    assert step in whole and whole[step] == agreement == max(whole.values())
    # and no other of those that were looked at first could be better
    assert all(min(own) <= agreement for own in found.values())


@pytest.mark.parametrize("best", range(MOST_STEPS))
def test_where_no_step_agrees_the_one_that_does_best_is_found_by_few(
    model, chunks, monkeypatch, best
) -> None:
    """Long steps are off by the third order, short ones by rounding: the further from the best, the more."""
    steered, count = randomly_steered(model, fit="closed"), 0
    batch = chunks.batch(np.arange(2))
    linear = measure_linear(steered, batch)
    away = np.random.default_rng(0).standard_normal(linear.shape)

    def off(steered, batch, *, subsets, batch_size):
        nonlocal count
        count, row = count + 1, int(batch.rows[0])
        apart = abs(exact_response._STEPS.index(steered.operators.step) - best)
        return (linear + (0.1 + 0.05 * apart) * linear.std() * away)[row : row + 1, subsets]

    monkeypatch.setattr(exact_response, "measure_exact", off)
    step, agreement = choose_step(steered, batch, seed=0)
    assert step == exact_response._STEPS[best] and 0.9 < agreement < 0.999
    assert count <= 14  # of 26


def test_a_query_without_scored_tokens_is_refused(model) -> None:
    batch = pad_batch(np.asarray([3]), [np.asarray([1, 2, 3])], [np.zeros(3)])
    with pytest.raises(QueryError, match="query 3 has no scored token"):
        measure_exact(randomly_steered(model), batch)


def test_additive_measurement_makes_means_into_sums() -> None:
    """With s known, the additive measurement is M (s − s̄) / m̄ exactly, whatever the row sizes."""
    random = np.random.default_rng(0)
    design = (random.random((9, 30)) < 0.3).astype(float)
    s = random.standard_normal(30)
    sizes = design.sum(1)
    means = design @ s / sizes
    mean = (means * sizes).sum() / sizes.sum()
    expected = design @ (s - mean) / sizes.mean()
    np.testing.assert_allclose(additive_measurement(means, sizes), expected, rtol=1e-10)
    equal = np.full(9, 4)
    np.testing.assert_allclose(additive_measurement(means, equal), means - means.mean(), rtol=1e-10)
