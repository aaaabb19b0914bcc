"""Steering a network's own weights: gates are weight changes, solved as far as its training went."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from stride_cli.data.example_queries import queries_of_rows
from stride_cli.errors import NumericalError
from stride_cli.models.classifier.classifier_recipe import ClassifierRecipe, training_path
from stride_cli.models.classifier.directory import load_classifier
from stride_cli.models.classifier.networks import NetworkSpec
from stride_cli.models.spec import ModelSpec
from stride_cli.operators.closed import ClosedSettings, fit_closed, fit_spaces
from stride_cli.operators.fisher import label_fisher, solve_gates
from stride_cli.operators.gradients import gate_gradients
from stride_cli.operators.linear_response import measure_linear
from stride_cli.operators.steered_model import SteeredModel
from stride_cli.research.paper.exact_response import measure_exact
from stride_cli.training.classifiers import ClassifierOptions, train_classifier
from tests.stride_cli.models.classifier.test_classifier_model import N, make, reader

RANKS = {"head-matrix": 9, "linear-matrix": 99}
SETTINGS = ClosedSettings(
    spaces=("head-matrix", "linear-matrix"), layer=1, ranks=RANKS, n_buckets=9, curvature="exact", time=3.0
)


def weight_gradients(model, batch) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:  # type: ignore[no-untyped-def]
    """Of every row: ∂loss/∂ of the hidden layer's weight, the head's weight and its bias."""
    hidden, head = model.linear_layers("all")[0], model.head
    found = []
    for row in range(len(batch.ids)):
        parameters = [hidden.weight, head.weight, head.bias]
        for parameter in parameters:
            parameter.requires_grad_(True)
        logits = model.model(model.inputs(batch.ids[row : row + 1]))
        loss = nn.functional.cross_entropy(logits, batch.ids[row : row + 1, 1])
        found.append(torch.autograd.grad(loss, parameters))
        for parameter in parameters:
            parameter.requires_grad_(False)
    return found  # type: ignore[return-value]


def test_gates_are_changes_of_the_weights() -> None:
    model = make("mlp", (5,))
    chunks = reader(model)
    steered = fit_spaces(model, chunks, SETTINGS)  # type: ignore[arg-type]
    head, inside = steered.spaces
    batch = chunks.batch(np.arange(6))
    (of_head, of_inside), _ = gate_gradients(steered, batch)
    V, U = inside.bases(0)  # type: ignore[attr-defined]
    for row, (hidden, weight, bias) in enumerate(weight_gradients(model, batch)):
        expected = -torch.cat([weight, bias[:, None]], dim=1).float() @ head.B.T  # type: ignore[operator]
        torch.testing.assert_close(of_head[row].reshape(3, -1), expected, rtol=1e-4, atol=1e-6)
        expected = -(U.T @ hidden.float() @ V.T)
        torch.testing.assert_close(of_inside[row].reshape(expected.shape), expected, rtol=1e-4, atol=1e-6)
    # nothing of the weights is left out
    assert head.B.shape == (9, 9) and V.shape == (5, 5) and U.shape == (8, 8)


def test_the_diagonal_inside_the_blocks_is_that_of_all_labels() -> None:
    model = make("mlp", (5,))
    chunks = reader(model)
    steered = fit_spaces(model, chunks, SETTINGS)  # type: ignore[arg-type]
    full, diagonal = label_fisher(steered, chunks, batch_tokens=7, seed=0)
    assert full.shape == (27, 27) and diagonal.shape == (40,)
    batch = chunks.batch(np.arange(N))
    p = model.predict(batch.ids).double().softmax(-1)
    expected = torch.zeros(40, dtype=torch.float64)
    for label in range(3):
        batch.ids[:, 1] = label
        gradient = gate_gradients(steered, batch)[0][1]
        expected += (p[:, label, None] * gradient.double().square()).mean(0)
    torch.testing.assert_close(diagonal, expected, rtol=1e-3, atol=1e-9)
    # eigenvectors: A and S are diagonal in the bases
    V, _ = steered.spaces[1].bases(0)  # type: ignore[attr-defined]
    torch.testing.assert_close(V @ V.T, torch.eye(5), atol=1e-5, rtol=0)
    read = V.double() @ model.inputs(batch.ids).double().T
    moment = read @ read.T / N
    assert (moment - moment.diag().diag()).abs().max() < 1e-4 * moment.max()


@given(st.integers(0, 10_000), st.floats(0.01, 100.0), st.booleans())
@settings(max_examples=30, deadline=None)
def test_time_is_that_of_gradient_flow(seed: int, time: float, diagonal: bool) -> None:
    """dθ/dt = g − F θ from 0, by the matrix exponential of the linear system."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(3, 5, generator=generator, dtype=torch.float64)  # rank 3 of 5
    F = rows.T @ rows / 5
    if diagonal:
        F = F.diag().diag()
    g = torch.randn(2, 5, generator=generator)
    system = torch.zeros(6, 6, dtype=torch.float64)
    for gradient in g:
        system[:5, :5], system[:5, 5] = -F, gradient.double()
        expected = torch.linalg.matrix_exp(system * time)[:5, 5]
        found = solve_gates(gradient[None].clone(), F.diag() if diagonal else F, damping=1.0, time=time)[0]
        scale = float(expected.abs().max())
        torch.testing.assert_close(found.double() / scale, expected / scale, rtol=1e-4, atol=1e-5)


def test_damping_solves_the_damped_system() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(9, 4, generator=generator, dtype=torch.float64)
    F = rows.T @ rows / 9
    g = torch.randn(3, 4, generator=generator)
    system = 2.0 * F + 0.3 * 2.0 * F.trace() / 4 * torch.eye(4)
    found = solve_gates(g.clone(), F, damping=0.3, stability=2.0)
    torch.testing.assert_close(
        found.double(), torch.linalg.solve(system, g.double().T).T, rtol=1e-5, atol=1e-6
    )
    with pytest.raises(NumericalError, match="trace 0"):
        solve_gates(g, torch.zeros(4, 4, dtype=torch.float64), damping=1.0)


@pytest.mark.parametrize("curvature", ["exact", "kronecker"])
def test_linear_and_exact_responses_agree(curvature: str) -> None:
    """Kronecker is what a classifier gets whose head is too large for an exact Fisher matrix."""
    model = make("mlp", (5,))
    drawn = np.random.default_rng(0).permuted(np.tile(np.arange(8), (N, 1)), axis=1)
    columns = drawn[:, :3].astype(np.uint16)
    chosen = replace(SETTINGS, curvature=curvature)
    operators = fit_closed(model, reader(model), columns, 8, chosen)  # type: ignore[arg-type]
    operators.step = 1e-3 / max(float(np.abs(gates).max()) for gates in operators.gates)
    queries = queries_of_rows(model, np.arange(N, N + 6)).batch(np.arange(6))
    steered = SteeredModel.of(model, operators)  # type: ignore[arg-type]
    linear, exact = measure_linear(steered, queries), measure_exact(steered, queries)
    np.testing.assert_allclose(linear, exact, rtol=0.05, atol=0.02 * np.abs(linear).max())


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("steering")
    random = np.random.default_rng(0)
    inputs = random.normal(size=(90, 6))
    np.savez(folder / "data.npz", inputs=inputs, labels=(inputs[:, 0] + inputs[:, 1] > 0).astype(int))
    options = ClassifierOptions(width=8, epochs=5, batch_size=16, holdout=10, checkpoints=3)
    train_classifier(folder / "data.npz", folder / "model", options)
    train_classifier(folder / "data.npz", folder / "plain", replace(options, checkpoints=0))
    return folder


def test_training_keeps_checkpoints(trained: Path) -> None:
    names = sorted(path.name for path in (trained / "model" / "checkpoints").iterdir())
    assert names == ["step-000006", "step-000012", "step-000019"]
    assert not (trained / "plain" / "checkpoints").exists()
    final = (trained / "model" / "weights.safetensors").read_bytes()
    assert final == (trained / "plain" / "weights.safetensors").read_bytes()
    path = training_path(load_classifier(trained / "model"))
    plain = training_path(load_classifier(trained / "plain"))
    assert path is not None and plain is not None and path.time == plain.time
    assert [Path(place).name for place, _ in path.checkpoints] == names and plain.checkpoints == ()
    recipe = ClassifierRecipe(NetworkSpec("mlp"), epochs=5, batch_size=16)
    rates = [recipe.rate(step, 80) for step in range(25)]
    assert path.time == pytest.approx(sum(rates) / 0.1)
    assert [share for _, share in path.checkpoints] == pytest.approx(
        [sum(rates[a:b]) / sum(rates) for a, b in ((0, 6), (6, 12), (12, 19))]
    )


def test_gradients_and_curvature_are_means_over_the_training(trained: Path) -> None:
    """The gates of a trajectory, against the two ends of it fitted alone."""
    model = load_classifier(ModelSpec(trained / "model", dtype="fp64"))
    random = np.random.default_rng(1)
    data = random.normal(size=(30, 6))
    model.attach(data, np.arange(24), random.integers(0, 2, 30), [str(row) for row in range(30)])
    columns = random.permuted(np.tile(np.arange(6), (24, 1)), axis=1)[:, :2].astype(np.uint16)
    chunks = reader(model)
    checkpoint = str(trained / "model" / "checkpoints" / "step-000012")
    chosen = replace(SETTINGS, time=0.5)
    found = fit_closed(model, chunks, columns, 6, replace(chosen, trajectory=((checkpoint, 0.25),)))  # type: ignore[arg-type]
    own = fit_spaces(model, chunks, chosen)  # type: ignore[arg-type]
    earlier = load_classifier(ModelSpec(checkpoint, dtype="fp64"))
    earlier.table = model.table
    mean = curvature = None
    for weight, steered in ((0.75, own), (0.25, replace(own, model=earlier))):  # type: ignore[arg-type]
        gradient = gate_gradients(steered, chunks.batch(np.arange(24)))[0]
        fisher = label_fisher(steered, chunks, batch_tokens=64, seed=0)
        mean = [weight * g + (0 if mean is None else mean[i]) for i, g in enumerate(gradient)]
        curvature = [weight * f + (0 if curvature is None else curvature[i]) for i, f in enumerate(fisher)]
    assert mean is not None and curvature is not None
    member = torch.zeros(6, 24)
    for row, subsets in enumerate(columns):
        member[subsets.astype(int), row] = 1
    for number, gates in enumerate(found.gates):
        subset_mean = member @ mean[number].float() / member.sum(1, keepdim=True)
        expected = solve_gates(subset_mean, curvature[number], damping=1.0, time=0.5)
        torch.testing.assert_close(torch.from_numpy(gates), expected, rtol=1e-3, atol=1e-5)
