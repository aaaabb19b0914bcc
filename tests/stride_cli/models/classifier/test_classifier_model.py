"""ClassifierModel: parts add up, gradients through it, the table of inputs, queries."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from stride_cli.data.batches import ChunkReader
from stride_cli.data.example_queries import queries_of_rows, register
from stride_cli.models.classifier.classifier_model import ClassifierModel, Standardisation
from stride_cli.models.classifier.networks import build_network, choose_network
from stride_cli.operators.closed import ClosedSettings, fit_closed
from stride_cli.operators.fisher import label_fisher
from stride_cli.operators.gradients import gate_gradients
from stride_cli.operators.linear_response import measure_linear
from stride_cli.operators.operator_space import layer_norm
from stride_cli.operators.steered_model import SteeredModel
from stride_cli.research.paper.exact_response import measure_exact
from stride_cli.research.paper.sgd import initial_space

CLASSES = ["a", "b", "c"]
N = 24


class MemoryIndex:
    """The arrays that `ChunkReader` reads: chunk i is (i, label)."""

    def __init__(self, labels: np.ndarray) -> None:
        n = len(labels)
        self.arrays = {
            "corpus/tokens": np.stack([np.arange(n), labels], 1).reshape(-1).astype(np.uint16),
            "corpus/chunk_offsets": 2 * np.arange(n + 1),
            "corpus/loss_start": np.ones(n, np.int32),
        }

    def array(self, name: str) -> np.ndarray:
        return self.arrays[name]

    def has(self, name: str) -> bool:
        return name in self.arrays


def make(name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> ClassifierModel:
    """An untrained network on random inputs, of which the first N rows are the chunks, backwards."""
    random = np.random.default_rng(0)
    data = random.normal(2.0, 3.0, (N + 6, *shape))
    labels = random.integers(0, 3, N + 6)
    network = build_network(choose_network(name, width=8), shape, 3, seed=1).to(dtype)
    if name == "logistic":
        nn.init.normal_(network.head.weight, std=0.5)
    model = ClassifierModel(
        network, classes=CLASSES, shape=shape, standardisation=Standardisation.of(data, by_column=True)
    )
    model.attach(data, np.arange(N)[::-1], labels, [f"r{row}" for row in range(len(data))])
    return model


def reader(model: ClassifierModel) -> ChunkReader:
    return ChunkReader(MemoryIndex(model.row_labels[model.table.chunk_rows]))  # type: ignore[arg-type]


NETWORKS = [("mlp", (5,)), ("logistic", (5,)), ("resnet9", (8, 8))]


@pytest.mark.parametrize(("name", "shape"), NETWORKS)
def test_parts_add_up_at_every_layer(name: str, shape: tuple[int, ...]) -> None:
    model = make(name, shape)
    batch = reader(model).batch(np.arange(N))
    with torch.no_grad():
        whole = model.model(model.inputs(batch.ids))
        for layer in range(model.n_layers + 1):
            hidden = model.hidden(batch.ids, layer)
            final = model.continue_from(hidden, layer)
            assert hidden.shape[:2] == (N, 2) and final.shape == (N, 2, model.d_model)
            assert not hidden[:, 1].any() and not final[:, 1].any()
            torch.testing.assert_close(model.logits(final)[:, 0], whole)
    torch.testing.assert_close(model.predict(batch.ids), whole)


@pytest.mark.parametrize(("name", "shape"), NETWORKS)
@pytest.mark.parametrize("space_name", ["residual", "residual-matrix", "logit"])
def test_gate_gradients_equal_finite_differences(name: str, shape: tuple[int, ...], space_name: str) -> None:
    model = make(name, shape)
    batch = reader(model).batch(np.arange(4))
    for layer in range(model.n_layers + 1):
        width = model.hidden(batch.ids, layer).shape[-1] if space_name != "logit" else model.d_model
        space = initial_space(space_name, d_model=width, vocab_size=3, rank=4, n_buckets=99, seed=3)
        space.requires_grad_(False)
        (gradient,), losses = gate_gradients(SteeredModel(model, [space], layer), batch)

        def loss(gates: torch.Tensor, layer: int = layer, space=space) -> torch.Tensor:  # type: ignore[no-untyped-def]
            hidden = model.hidden(batch.ids, layer)
            if space.site == "residual":
                hidden = hidden + space(hidden, gates).double()
            final = model.continue_from(hidden, layer)
            logits = model.logits(final)[:, 0]
            if space.site == "logit":
                logits = logits + space(final, gates)[:, 0].double()
            return nn.functional.cross_entropy(logits, batch.ids[:, 1], reduction="none")

        torch.testing.assert_close(losses, loss(torch.zeros(4, space.gate_size)), rtol=1e-5, atol=1e-6)
        generator = torch.Generator().manual_seed(layer)
        direction = torch.randn(4, space.gate_size, generator=generator)
        step = 1e-4 / direction.norm(dim=1, keepdim=True)
        numeric = -(loss(step * direction) - loss(-step * direction)) / (2 * step[:, 0])
        found = (gradient.double() * direction).sum(1)
        scale = float(found.abs().max()) + 1e-3
        torch.testing.assert_close(found / scale, numeric / scale, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize(("name", "shape"), NETWORKS)
@pytest.mark.parametrize("spaces", [("logit",), ("residual-matrix", "logit"), ("residual",)])
def test_linear_response_equals_exact_central_differences(
    name: str, shape: tuple[int, ...], spaces: tuple[str, ...]
) -> None:
    model = make(name, shape)
    chunks = reader(model)
    drawn = np.random.default_rng(0).permuted(np.tile(np.arange(8), (N, 1)), axis=1)
    columns = drawn[:, :3].astype(np.uint16)
    settings = ClosedSettings(spaces=spaces, layer=min(1, model.n_layers), ranks=dict.fromkeys(spaces, 8))
    operators = fit_closed(model, chunks, columns, 8, settings)  # type: ignore[arg-type]
    operators.step = 1e-3 / max(float(np.abs(gates).max()) for gates in operators.gates)
    queries = queries_of_rows(model, np.arange(N, N + 6)).batch(np.arange(6))
    steered = SteeredModel.of(model, operators)  # type: ignore[arg-type]
    linear, exact = measure_linear(steered, queries), measure_exact(steered, queries)
    np.testing.assert_allclose(linear, exact, rtol=0.05, atol=0.02 * np.abs(linear).max())


@pytest.mark.parametrize(("name", "shape"), NETWORKS)
def test_the_exact_fisher_matrix_is_the_gauss_newton_matrix(name: str, shape: tuple[int, ...]) -> None:
    model = make(name, shape)
    chunks = reader(model)
    space = initial_space("logit", d_model=model.d_model, vocab_size=3, rank=4, n_buckets=9, seed=0)
    space.requires_grad_(False)
    (found,) = label_fisher(SteeredModel(model, [space], 0), chunks, batch_tokens=16, seed=0)  # type: ignore[arg-type]
    batch = chunks.batch(np.arange(N))
    final = model.continue_from(model.hidden(batch.ids, 0), 0)
    features = (layer_norm(final)[:, 0] @ space.B.T).double()
    p = model.predict(batch.ids).double().softmax(-1)
    hessian = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]  # of the loss in the logits
    expected = torch.einsum("nab,ni,nj->aibj", hessian, features, features).reshape(12, 12) / N
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5 * float(expected.abs().max()))


def test_numbers_of_rows_do_not_change_when_queries_come() -> None:
    model = make("mlp", (5,))
    before = queries_of_rows(model, [2, N + 1])
    first = register(model, np.ones((2, 5)), [0, 1], ["x", "y"])
    assert queries_of_rows(model, [2, N + 1]).fingerprint() == before.fingerprint()
    assert [ids.tolist() for ids in first.ids] == [[2 * N + 6, 0], [2 * N + 6, 1]]  # one input, two labels
    np.testing.assert_array_equal(
        model.table.take(np.array([2 * N + 6, 0, N])),
        np.stack([np.ones(5), model.table.data[N - 1], model.table.data[0]]),
    )
    again = register(model, np.ones((1, 5)), [0])
    assert again.ids[0].tolist() == [2 * N + 6, 0]
    assert before.names == ["r2", f"r{N + 1}"]
