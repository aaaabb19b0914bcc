"""Tiny tasks whose gradients can be computed one by one: two language models, and classifiers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from stride_cli.data.batches import ChunkReader
from stride_cli.data.query_set import QuerySet
from stride_cli.data.workspace import Workspace
from stride_cli.models import loading
from stride_cli.models.spec import ModelSpec
from tests.stride_cli.research.methods.conftest import MemoryIndex

VOCABULARY = 41


class TableClassifier:
    """As much of an `AttributableModel` as gradients need; tokens are (number of the input, label)."""

    capture_layers = ("all",)
    all_layers = "all"
    length_kinds = None

    def __init__(self, table: Tensor, features: nn.Module, head: nn.Linear) -> None:
        self.table = table
        self.model = nn.ModuleDict({"features": features, "head": head}).requires_grad_(False).eval()
        self.n_layers, self.d_model, self.vocab_size = 1, head.in_features, head.out_features
        self.spec, self.path = ModelSpec(), None
        self.device, self.dtype = torch.device("cpu"), torch.float32

    def share_inputs(self, other: TableClassifier) -> None:
        self.table = other.table

    def hidden(self, ids: Tensor, layer: int) -> Tensor:
        return self.table[ids[:, 0]]  # (B, …)

    def continue_from(self, hidden: Tensor, layer: int) -> Tensor:
        state = self.model["features"](hidden)
        return torch.stack([state, torch.zeros_like(state)], dim=1)  # (B, 2, d)

    def logits(self, final: Tensor) -> Tensor:
        return self.model["head"](final)


def language_task(module: Any, n_chunks: int = 24, seed: int = 0, equal: int | None = None) -> Workspace:
    from stride_cli.models.language.causal_lm import CausalLM

    random = np.random.default_rng(seed)
    lengths = random.integers(2, 12, n_chunks) if equal is None else np.full(n_chunks, equal)
    chunks = [random.integers(0, VOCABULARY, length) for length in lengths]
    index: Any = MemoryIndex(chunks)
    model = CausalLM(module)
    return Workspace(index, model, ChunkReader(index, model), 0)


def _queries(n: int) -> QuerySet:
    random = np.random.default_rng(7)
    ids = [random.integers(0, VOCABULARY, length) for length in random.integers(3, 9, n)]
    weights = [np.ones(len(row), np.float32) for row in ids]
    weights[0][:2] = 0.0  # an answer after a prompt
    return QuerySet(ids, weights, [str(number) for number in range(n)])


@pytest.fixture(scope="session")
def queries() -> QuerySet:
    return _queries(7)


@pytest.fixture(scope="session")
def nanochat_task() -> Workspace:
    from tests.tiny_models import tiny_nanochat

    return language_task(tiny_nanochat(VOCABULARY))


@pytest.fixture(scope="session")
def gpt2_task() -> Workspace:
    """Conv1D layers with biases."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(1)
    sizes = {"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
    module = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=1, tie_word_embeddings=False))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return language_task(module, seed=1)


@pytest.fixture(scope="session")
def long_rope_task() -> Workspace:
    """Chunks and queries on both sides of the length from which padding changes positions."""
    from transformers import AutoModelForCausalLM

    from tests.tiny_models import long_rope_config

    torch.manual_seed(2)
    module = AutoModelForCausalLM.from_config(long_rope_config(VOCABULARY, 6))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return language_task(module, seed=2)


def classifier_task(
    features: nn.Module, head: nn.Linear, inputs: Tensor, labels: np.ndarray, n_train: int
) -> tuple[Workspace, QuerySet]:
    """The first n_train inputs are chunks, the others queries."""
    pairs = np.stack([np.arange(len(inputs)), labels], axis=1)
    index: Any = MemoryIndex(list(pairs[:n_train]), kind="classifier")
    model: Any = TableClassifier(inputs, features, head)
    weights = [np.array([0.0, 1.0], np.float32)] * (len(pairs) - n_train)
    queries = QuerySet(list(pairs[n_train:]), weights, [str(row) for row in range(len(weights))])
    return Workspace(index, model, ChunkReader(index), 0), queries


def example_gradients(
    task: Workspace, rows: list[tuple[np.ndarray, np.ndarray]], names: list[str], *, power: float = 1.0
) -> np.ndarray:
    """Gradient of each row's loss in the named parameters by autograd, one row at a time, (rows, p) float64.

    Parameters come one after the other; the gradient of each is flattened as (out, in).
    """
    model = task.model
    parameters = dict(model.model.named_parameters())
    chosen = [parameters[name] for name in names]
    found = []
    for ids, weights in rows:
        for parameter in chosen:
            parameter.requires_grad_(True)
        tokens = torch.from_numpy(np.asarray(ids, np.int64))[None]
        final = model.continue_from(model.hidden(tokens, 0), 0)
        log_p = model.logits(final).log_softmax(-1)[0, : len(ids) - 1]
        losses = -log_p.gather(-1, tokens[0, 1:, None])[:, 0]
        weight = torch.from_numpy(np.asarray(weights[1:], np.float32))
        loss = (losses * weight).sum() / max(1.0, float(weight.sum())) ** power
        gradients = torch.autograd.grad(loss, chosen)
        for parameter in chosen:
            parameter.requires_grad_(False)
        found.append(torch.cat([gradient.flatten() for gradient in gradients]).double().numpy())
    return np.stack(found)


@pytest.fixture(scope="session")
def autograd() -> Callable[..., np.ndarray]:
    return example_gradients


@pytest.fixture(scope="session")
def make_classifier() -> Callable[..., tuple[Workspace, QuerySet]]:
    return classifier_task


@pytest.fixture
def along_axes() -> tuple[Workspace, QuerySet, Tensor]:
    """Two labels, inputs along the axes, as the eigenbasis is: 50 examples, 10 queries, their gradients."""
    random = np.random.default_rng(0)
    inputs = torch.eye(5)[torch.from_numpy(random.integers(0, 5, 60))]
    inputs = inputs * torch.from_numpy(random.uniform(0.5, 2, (60, 1))).float()
    labels = torch.from_numpy(random.integers(0, 2, 60))
    nn.init.normal_((head := nn.Linear(5, 2, bias=False)).weight)
    task, queries = classifier_task(nn.Identity(), head, inputs, labels.numpy(), 50)
    error = (inputs @ head.weight.T).softmax(-1) - nn.functional.one_hot(labels, 2)
    return task, queries, torch.einsum("ni,nj->nij", error, inputs).flatten(1).detach().double()


def curvature(inputs: Tensor, weight: Tensor, weights: Tensor) -> Tensor:
    """Hessian (C·d, C·d) of Σ_i w_i loss_i / Σ_i w_i in the weight (C, d) of a softmax regression."""
    p = (inputs @ weight.T).softmax(-1)
    spread = (torch.diag_embed(p) - p[:, :, None] * p[:, None, :]) * (weights / weights.sum())[:, None, None]
    return torch.einsum("nij,nk,nl->ikjl", spread, inputs, inputs).reshape(weight.numel(), weight.numel())


def fit_softmax(inputs: Tensor, labels: Tensor, weights: Tensor, ridge: float, start: Tensor) -> Tensor:
    """Minimiser of Σ_i w_i loss_i / Σ_i w_i + ½ ridge ‖W‖² over (classes, d), by Newton's method from
    `start`, float64."""
    found = start.detach().clone().requires_grad_()
    for _ in range(12):
        losses = nn.functional.cross_entropy(inputs @ found.T, labels, reduction="none")
        objective = (losses * weights).sum() / weights.sum() + 0.5 * ridge * found.square().sum()
        (slope,) = torch.autograd.grad(objective, found)
        if float(slope.norm()) < 1e-11:
            break
        with torch.no_grad():
            hessian = curvature(inputs, found, weights) + ridge * torch.eye(found.numel(), dtype=found.dtype)
            found -= torch.linalg.solve(hessian, slope.flatten()).view_as(found)
    else:
        raise AssertionError("Newton's method has not found the minimum")
    return found.detach()


class Softmax:
    """A fitted softmax regression as a task, and its exact influences.

    Attributes
    ----------
    task, queries
    exact : (Q, n) float64       g_qᵀ H⁻¹ g_i with H the Hessian of the objective
    ridge : float                mean of the Hessian's eigenvalues without the ridge times `damping`
    """

    def __init__(self, n: int = 120, d: int = 5, classes: int = 3, n_queries: int = 12) -> None:
        torch.manual_seed(3)
        centres = torch.randn(classes, d, dtype=torch.float64) * 1.2
        labels = torch.arange(n + n_queries) % classes
        self.inputs = centres[labels] + torch.randn(n + n_queries, d, dtype=torch.float64)
        self.inputs[:, -1] = 1.0
        labels = torch.where(torch.rand(n + n_queries) < 0.15, (labels + 1) % classes, labels)
        self.labels, self.n, self.classes, self.ridge = labels, n, classes, 0.02
        train, weights = self.inputs[:n], torch.ones(n, dtype=torch.float64)
        self.weight = fit_softmax(train, labels[:n], weights, self.ridge, torch.zeros(classes, d).double())
        head = nn.Linear(d, classes, bias=False)
        with torch.no_grad():
            head.weight.copy_(self.weight.float())
        self.task, self.queries = classifier_task(nn.Identity(), head, self.inputs.float(), labels.numpy(), n)
        p = (self.inputs @ self.weight.T).softmax(-1)
        error = p - nn.functional.one_hot(labels, classes)
        self.gradients = torch.einsum("ni,nj->nij", error, self.inputs).flatten(1)  # (n + Q, C·d)
        self.ggn = curvature(train, self.weight, weights)
        self.hessian = self.ggn + self.ridge * torch.eye(classes * d, dtype=torch.float64)

    def influence(self, matrix: Tensor) -> np.ndarray:
        """g_qᵀ matrix⁻¹ g_i, (Q, n)."""
        return (self.gradients[self.n :] @ torch.linalg.solve(matrix, self.gradients[: self.n].T)).numpy()

    def left_out(self) -> np.ndarray:
        """Change of every query's loss when an example is left out and the model fitted again, (Q, n)."""
        n, held = self.n, slice(self.n, None)

        def losses(weight: Tensor) -> Tensor:
            return nn.functional.cross_entropy(
                self.inputs[held] @ weight.T, self.labels[held], reduction="none"
            )

        base, changes = losses(self.weight), []
        for row in range(n):
            weights = torch.ones(n, dtype=torch.float64)
            weights[row] = 0.0
            refit = fit_softmax(self.inputs[:n], self.labels[:n], weights, self.ridge, self.weight)
            changes.append(losses(refit) - base)
        return torch.stack(changes, dim=1).numpy()


@pytest.fixture(scope="session")
def softmax() -> Softmax:
    return Softmax()


@pytest.fixture
def scaled(softmax: Softmax, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Make checkpoints of it: the numbers that they are named by, times its weights."""
    original = softmax.task.model.model["head"].weight.clone()

    def load(given: ModelSpec) -> TableClassifier:
        assert (given.device, given.dtype) == ("cpu", "fp32")
        model = TableClassifier(torch.empty(0), nn.Identity(), nn.Linear(5, 3, bias=False))
        model.model["head"].weight.copy_(original * float(Path(str(given.path)).name))
        return model

    monkeypatch.setattr(loading, "load_model", load)

    def make(*names: str) -> str:
        for name in names:
            (tmp_path / name).mkdir()
        return "|".join(str(tmp_path / name) for name in names)

    return make


@pytest.fixture(scope="session")
def left_out(softmax: Softmax) -> np.ndarray:
    return softmax.left_out()


@pytest.fixture(scope="session")
def agreement() -> Callable[[np.ndarray, np.ndarray], float]:
    """Pearson correlation over chunks, the smallest over queries."""

    def smallest(found: np.ndarray, expected: np.ndarray) -> float:
        return min(float(np.corrcoef(a, b)[0, 1]) for a, b in zip(found, expected, strict=True))

    return smallest
