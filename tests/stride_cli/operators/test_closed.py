"""The closed form against brute-force minimisation, primal against dual, its pass against a plain loop."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from stride_cli.data.batches import ChunkReader
from stride_cli.models.linear_layers import AdapterMatrices
from stride_cli.operators import closed, gradient_sums
from stride_cli.operators.bases import label_uniforms
from stride_cli.operators.closed import ClosedSettings, fit_closed
from stride_cli.operators.fisher import solve_gates
from stride_cli.operators.gradients import gate_gradients, signals
from stride_cli.operators.operator_space import layer_norm
from stride_cli.operators.pair_space import PairLogitSpace, token_pairs
from stride_cli.operators.residual_spaces import ResidualSpace
from stride_cli.operators.second_moments import Moments
from stride_cli.operators.spaces import SPACES
from stride_cli.operators.steered_model import SteeredModel

K, DEGREE = 12, 3


@pytest.fixture(scope="module")
def columns() -> np.ndarray:
    random = np.random.default_rng(1)
    return np.stack([np.sort(random.choice(K, DEGREE, replace=False)) for _ in range(40)]).astype(np.uint16)


def settings_for(space: str, **changes) -> ClosedSettings:
    ranks = {"residual": 5, "residual-matrix": 4, "logit": 3, "token-logit": 3}
    ranks |= {"mlp-matrix": 3, "output-matrix": 3, "linear-matrix": 3}
    return ClosedSettings(spaces=tuple(space.split("+")), layer=2, ranks=ranks, **changes)


def random_problem(n_rows: int, size: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(4, size, generator=generator), torch.randn(n_rows, size, generator=generator)


def test_gates_equal_brute_force_minimisation() -> None:
    """L-BFGS on −ḡ·a + ½ aᵀ(λF + γI)a, without using the solution's formula."""
    mean, rows = random_problem(30, 8, 0)
    damping, stability = 0.3, 2.0
    fisher = rows.double().T @ rows.double() / 30
    gamma = damping * stability * float(fisher.trace()) / 8
    found = torch.zeros(4, 8, dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.LBFGS([found], max_iter=500, tolerance_grad=1e-12, line_search_fn="strong_wolfe")

    def objective() -> torch.Tensor:
        optimiser.zero_grad()
        quadratic = stability * ((found @ fisher) * found).sum() / 2 + gamma * (found**2).sum() / 2
        loss = quadratic - (mean.double() * found).sum()
        loss.backward()
        return loss

    optimiser.step(objective)
    gates = solve_gates(mean, fisher, damping=damping, stability=stability)
    torch.testing.assert_close(gates.double(), found.detach(), rtol=1e-4, atol=1e-6)


def test_the_pass_equals_a_plain_loop(model, chunks: ChunkReader, columns: np.ndarray) -> None:
    """Where F is estimated from drawn labels."""
    chosen = settings_for("residual", batch_tokens=64)
    operators = fit_closed(model, chunks, columns, K, chosen)
    gradients, rows = [], []
    for chunk in range(chunks.n_chunks):
        batch = chunks.batch(np.asarray([chunk]))
        steered = SteeredModel(model, operators.spaces, 2)
        true, _ = gate_gradients(steered, batch)
        drawn, _ = gate_gradients(steered, batch, sampled=label_uniforms(chosen.seed, batch))
        gradients.append(true[0][0] * batch.scored[0] * chunks.n_chunks / chunks.scored_tokens())
        rows.append(drawn[0][0] * batch.scored[0].sqrt())
    matrix = torch.zeros(K, chunks.n_chunks)
    for chunk, subsets in enumerate(columns):
        matrix[subsets.astype(np.int64), chunk] = 1
    mean = matrix @ torch.stack(gradients) / matrix.sum(1, keepdim=True).clamp_min(1)
    R = torch.stack(rows).double()
    expected = solve_gates(mean, R.T @ R / len(R), damping=chosen.damping)
    scale = float(expected.abs().max())
    torch.testing.assert_close(torch.from_numpy(operators.gates[0]), expected, rtol=1e-2, atol=1e-3 * scale)
    assert operators.coverage == 1.0


@pytest.mark.parametrize("space", ["residual-matrix", "logit", "token-logit"])
def test_the_kronecker_form_solves_with_the_product_of_second_moments(
    model, chunks: ChunkReader, columns: np.ndarray, space: str
) -> None:
    """As seen by the activations: shift ∝ (A ⊗ S)⁻¹ ḡ, with A and S from plain sums over tokens (the factor:
    `test_whitened_bases_have_a_fisher_matrix_of_mean_eigenvalue_one`)."""
    layer, damping, full = 2, 0.3, 24
    ranks = dict.fromkeys(SPACES, full)
    chosen = ClosedSettings(spaces=(space,), layer=layer, ranks=ranks, damping=damping, batch_tokens=64)
    operators = fit_closed(model, chunks, columns, K, chosen)
    inner, outer, prediction, tokens = 0.0, 0.0, 0.0, 0
    gradients = []
    for chunk in range(chunks.n_chunks):
        batch = chunks.batch(np.asarray([chunk]))
        watched = SteeredModel(model, [ResidualSpace(torch.zeros(1, 24), torch.zeros(24, 1))], layer)
        true = signals(watched, batch, with_inputs=True)
        drawn = signals(watched, batch, sampled=label_uniforms(chosen.seed, batch))
        read = {"residual-matrix": true.hidden, "logit": true.final, "token-logit": true.inputs}[space]
        predicts = torch.nonzero(batch.weights[0, 1:]).flatten()
        features = layer_norm(read)[0, predicts].double()
        inner = inner + features.T @ features
        scored, tokens = float(batch.scored[0]), tokens + len(predicts)
        logits = model.logits(model.continue_from(model.hidden(batch.ids, layer), layer))[0, predicts]
        probability = logits.double().softmax(-1)
        prediction = prediction + probability.sum(0)
        # labels of one token move the stream at all tokens before it, hence pulls everywhere, read at `used`
        pulls = drawn.pull[0, predicts].double() * scored
        outer = outer + pulls.T @ pulls
        if space == "residual-matrix":
            every = layer_norm(true.hidden)[0].double()
            gradients.append(true.pull[0].double().T @ every * scored)
        else:
            error = torch.nn.functional.one_hot(batch.ids[0, predicts + 1], 61) - probability
            error = error * (1 - (logits.double() / 15) ** 2)  # before NanoChat's soft cap
            gradients.append(error.T @ features)

    def inverse(moment: torch.Tensor) -> torch.Tensor:
        moment = moment / tokens
        return torch.linalg.inv(moment + damping * moment.trace() / len(moment) * torch.eye(len(moment)))

    left = inverse(outer) if space == "residual-matrix" else torch.diag(1 / (prediction / tokens + 1 / 61))
    matrix = torch.zeros(K, chunks.n_chunks, dtype=torch.float64)
    for chunk, subsets in enumerate(columns):
        matrix[subsets.astype(np.int64), chunk] = 1
    weights = matrix / matrix.sum(1, keepdim=True).clamp_min(1) * chunks.n_chunks / tokens
    expected = torch.einsum("kn,nij->kij", weights, torch.stack(gradients))
    expected = left @ expected @ inverse(inner)
    state = torch.randn(1, 3, 24, generator=torch.Generator().manual_seed(0))
    fitted = operators.spaces[0]
    shift = fitted(state.expand(K, -1, -1), torch.from_numpy(operators.gates[0])).double()
    wanted = torch.einsum("kij,tj->kti", expected, layer_norm(state)[0].double())
    wanted = wanted * float((shift * wanted).sum() / wanted.square().sum())
    torch.testing.assert_close(shift, wanted, rtol=1e-3, atol=1e-3 * float(wanted.abs().max()))


def test_moments_are_weighted_sums_of_outer_products() -> None:
    rows, weight, moments = torch.randn(3000, 300), torch.arange(3000) % 3, Moments()
    for some in torch.arange(3000).split(700):
        moments.add("rows", rows[some], weight[some])
    expected = np.einsum("n,ni,nj->ij", weight.numpy() ** 2, rows.numpy(), rows.numpy())
    np.testing.assert_allclose(moments.take("rows").triu(), np.triu(expected), rtol=1e-4, atol=0.01)


def test_the_fisher_rows_estimate_the_hessian_of_the_stability_loss(model, chunks: ChunkReader) -> None:
    """E[(r·v)²] over drawn labels equals the second derivative of mean-token KL(base ∥ steered) along v."""
    from stride_cli.research.paper.sgd import initial_space

    space = initial_space("residual-matrix", d_model=24, vocab_size=61, rank=4, n_buckets=64, seed=3)
    space.requires_grad_(False)
    chunk = int(np.argmax(chunks.lengths))
    batch = chunks.batch(np.asarray([chunk]))
    direction = torch.randn(1, space.gate_size, generator=torch.Generator().manual_seed(5))
    hidden = model.hidden(batch.ids, 2)
    base = model.logits(model.continue_from(hidden, 2)).double().log_softmax(-1)[0, :-1]

    def divergence(step: float) -> float:
        state = hidden + space(hidden, step * direction)
        steered = model.logits(model.continue_from(state, 2)).double().log_softmax(-1)[0, :-1]
        per_token = (base.exp() * (base - steered)).sum(-1)
        return float((per_token * batch.weights[0, 1:]).sum() / batch.scored[0])

    step = 1e-2
    curvature = (divergence(step) + divergence(-step)) / step**2
    random = np.random.default_rng(0)
    copies = chunks.batch(np.full(2000, chunk))
    uniforms = random.random(tuple(copies.ids.shape))
    drawn, _ = gate_gradients(SteeredModel(model, [space], 2), copies, sampled=uniforms)
    squares = ((drawn[0] @ direction[0]) * copies.scored.sqrt()).numpy() ** 2
    error = squares.std() / 2000**0.5
    assert error < 0.05 * curvature
    assert abs(squares.mean() - curvature) < 4 * error + 0.01 * curvature


@pytest.mark.parametrize("names", ["residual-matrix+logit", "linear-matrix+token-logit", "pair-logit"])
def test_whitened_bases_have_a_fisher_matrix_of_that_mean_eigenvalue(model, chunks, names: str) -> None:
    """Of every layer and logit space, under labels that were drawn for neither the bases nor their scale."""
    settings = settings_for(names)
    steered = closed.fit_spaces(model, chunks, replace(settings, ranks={**settings.ranks, "pair-logit": 999}))
    usual = 4.0 if names == "pair-logit" else 1.0
    assert all(space.mean_eigenvalue == usual for space in steered.spaces)
    batch = chunks.batch(np.arange(chunks.n_chunks))
    generator = np.random.default_rng(8)
    draws = []
    for _ in range(12):
        drawn, _ = gate_gradients(steered, batch, sampled=generator.random(batch.ids.shape))
        assert drawn is not None
        pairs = zip(steered.spaces, drawn, strict=True)
        squares = [gradient[:, part].square().mean(1) for s, gradient in pairs for part in s.parts()]
        draws.append(torch.stack([(s * batch.scored**2).sum() / batch.scored.sum() for s in squares]))
    found = torch.stack(draws) / usual
    assert found.shape[1] == {"r": 2, "l": 6 * model.n_layers + 1, "p": 1}[names[0]]
    error = found.std(0) / 12**0.5
    # the scale itself comes from one draw
    assert bool(((found.mean(0) - 1).abs() < 5 * 12**0.5 * error + 0.02).all())
    assert float((found.mean(0) - 1).abs().mean()) < 0.25


@pytest.mark.parametrize("name", ["mlp-matrix", "output-matrix", "linear-matrix"])
@pytest.mark.parametrize("adapted", [(), ("A",), ("A", "B")])
def test_gates_inside_the_blocks_are_whitened_layer_by_layer(
    model, chunks, columns, monkeypatch: pytest.MonkeyPatch, name: str, adapted: tuple[str, ...]
) -> None:
    """U_j a V_j φ = S⁻¹ Ḡ_l A⁻¹ φ with Ḡ_l the mean weight gradient of the linear layer; with an adapter B A
    a layer has a matrix whose V_j is of A's rows, and where B is known one whose U_j is of its columns."""
    chosen = replace(settings_for(name), ranks={name: 24})
    layers = model.linear_layers(SPACES[name].which)
    if adapted:
        generator = torch.Generator().manual_seed(0)
        own = [
            AdapterMatrices(
                torch.randn(2, layer.in_features, generator=generator),
                torch.randn(layer.out_features, 2, generator=generator) if "B" in adapted else None,
            )
            for layer in layers
        ]
        monkeypatch.setattr(type(model), "adapter_matrices", lambda self, which: own)
    operators = fit_closed(model, chunks, columns, K, chosen)
    space = operators.spaces[0]
    assert space.gate_size == SPACES[name].reserved_gates(model, 24)
    if adapted:
        for layer, (rows, given) in enumerate(own):
            numbers = space.matrices[layer]
            assert len(numbers) == len(adapted)
            V = space.bases(numbers[0])[0]
            assert V.shape == rows.shape and torch.linalg.matrix_rank(torch.cat([V, rows]), rtol=1e-4) == 2
            if given is not None:
                U = space.bases(numbers[1])[1]
                both = torch.cat([U, given], dim=1)
                assert U.shape == given.shape and torch.linalg.matrix_rank(both, rtol=1e-4) == 2
        most = SPACES[name].choose_rank(model, K, None)
        assert most == model.d_model and SPACES[name].choose_rank(model, 10**9, None) == 1
    assert len(layers) == model.n_layers * {"mlp-matrix": 1, "output-matrix": 2}.get(name, 6)
    sums = [torch.zeros(K, *layer.weight.shape) for layer in layers]
    tokens = 0
    for chunk in range(chunks.n_chunks):
        batch = chunks.batch(np.asarray([chunk]))
        tokens += float(batch.scored[0])
        for layer in layers:
            layer.weight.requires_grad_(True)
        logits = model.model(batch.ids).logits[0, :-1]
        losses = torch.nn.functional.cross_entropy(logits, batch.ids[0, 1:], reduction="none")
        grads = torch.autograd.grad((losses * batch.weights[0, 1:]).sum(), [layer.weight for layer in layers])
        for layer in layers:
            layer.weight.requires_grad_(False)
        for total, gradient in zip(sums, grads, strict=True):
            for subset in columns[chunk]:
                total[int(subset)] -= gradient
    sizes = np.maximum(np.bincount(columns.reshape(-1), minlength=K), 1)
    scale = torch.from_numpy(chunks.n_chunks / tokens / sizes)[:, None, None]
    start = 0
    for number, total in (
        (number, sums[layer]) for layer in range(len(layers)) for number in space.matrices[layer]
    ):
        V, U = space.bases(number)
        expected = (U.T @ (total * scale).float() @ V.T).flatten(1)
        found = torch.from_numpy(operators.gates[0][:, start : start + expected.shape[1]])
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))
        start += expected.shape[1]
    assert start == operators.gate_size


def test_an_interrupted_pass_continues_to_the_same_bits(
    model, chunks: ChunkReader, columns: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = settings_for("residual-matrix+logit", batch_tokens=64)
    whole = fit_closed(model, chunks, columns, K, chosen)
    calls = {"count": 0}
    real = gradient_sums.chunk_gradients

    def dies(*arguments, **keywords):
        calls["count"] += 1
        if calls["count"] == 7:
            raise KeyboardInterrupt
        return real(*arguments, **keywords)

    monkeypatch.setattr(gradient_sums, "chunk_gradients", dies)
    with pytest.raises(KeyboardInterrupt):
        fit_closed(model, chunks, columns, K, chosen, scratch=tmp_path, save_seconds=0)
    monkeypatch.setattr(gradient_sums, "chunk_gradients", real)
    calls["count"] = 0

    def counts(*arguments, **keywords):
        calls["count"] += 1
        return real(*arguments, **keywords)

    monkeypatch.setattr(gradient_sums, "chunk_gradients", counts)
    monkeypatch.setattr(closed, "fit_bases", None)  # which are there
    resumed = fit_closed(model, chunks, columns, K, chosen, scratch=tmp_path, save_seconds=0)
    assert 0 < calls["count"] < len(chunks.plan(64))
    for a, b in zip(whole.gates, resumed.gates, strict=True):
        np.testing.assert_array_equal(a, b)


def test_pairs_of_tokens_are_the_corpus_s_own(model, chunks: ChunkReader, monkeypatch) -> None:
    monkeypatch.setattr("stride_cli.operators.pair_space._PAIRS_HELD", 20)
    expected: Counter[tuple[int, int]] = Counter()
    for row in range(chunks.n_chunks):
        ids, weights = chunks.chunk(row)
        expected.update(
            pair for pair, weight in zip(pairwise(ids.tolist()), weights[1:], strict=True) if weight
        )
    pairs, counts = token_pairs(chunks, model.vocab_size)
    found = {
        divmod(int(pair), model.vocab_size): int(count) for pair, count in zip(pairs, counts, strict=True)
    }
    assert found == expected and list(pairs) == sorted(pairs)
    few = PairLogitSpace.of_corpus(chunks, model.vocab_size, 25)
    kept = {
        (x, int(few.second[gate]))
        for x in range(model.vocab_size)
        for gate in range(int(few.start[x]), int(few.start[x + 1]))
    }
    assert len(kept) == few.gate_size == 25
    assert min(expected[pair] for pair in kept) >= max(n for pair, n in expected.items() if pair not in kept)
    torch.testing.assert_close(
        few.factor, torch.tensor([(expected[pair] + 1) ** -0.5 for pair in sorted(kept)])
    )
