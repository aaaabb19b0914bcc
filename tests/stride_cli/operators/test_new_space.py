"""A space that stride does not have, as one class that is listed: fitted, stored, measured, recovered."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Self

import numpy as np
import pytest
import torch

from index_format.reader import Index
from stride_cli import api
from stride_cli.data.batches import ChunkReader
from stride_cli.models.spec import ModelSpec
from stride_cli.operators.bases import label_uniforms
from stride_cli.operators.closed import fit_spaces
from stride_cli.operators.fisher import solve_gates
from stride_cli.operators.linear_response import measure_linear
from stride_cli.operators.operator_space import BasisOptions, OperatorSpace, Sample, layer_norm
from stride_cli.operators.options import resolve_settings
from stride_cli.operators.spaces import SPACES
from stride_cli.operators.steered_model import SteeredModel
from stride_cli.operators.store import Operators
from stride_cli.randomness import torch_seed

RANK = 24


class RandomProjectionSpace(OperatorSpace):
    """``Q a P LN(h)`` at one layer, between two random projections P (r, d) and Q (d, r); a is r × r."""

    name = "random-projection"
    site = "residual"
    default_rank = RANK

    def __init__(self, P: torch.Tensor, Q: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("P", P.clone())
        self.register_buffer("Q", Q.clone())
        self.P: torch.Tensor
        self.Q: torch.Tensor
        self.gate_size = Q.shape[1] * P.shape[0]

    def forward(self, hidden: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        matrix = gates.reshape(len(gates), self.Q.shape[1], self.P.shape[0])
        return torch.einsum("dq,bqr,re,bte->btd", self.Q, matrix, self.P, layer_norm(hidden))

    def gate_gradient(self, hidden: torch.Tensor, cotangent: torch.Tensor) -> torch.Tensor:
        return torch.einsum(
            "btd,dq,re,bte->bqr", cotangent.float(), self.Q, self.P, layer_norm(hidden)
        ).flatten(1)

    @classmethod
    def fit(cls, sample: Sample, options: BasisOptions) -> Self:
        generator = torch.Generator().manual_seed(torch_seed(options.seed, "random projection"))
        rank, width = options.ranks[cls.name], sample.model.d_model
        P, Q = (torch.randn(rank, width, generator=generator) / width**0.5 for _ in range(2))
        return cls(P, Q.T)


@pytest.fixture
def index_path(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(SPACES, RandomProjectionSpace.name, RandomProjectionSpace)
    return Path(shutil.copytree(trained / "run.stride", tmp_path / "run.stride"))


def train(index_path: Path, space: str) -> tuple[Index, Operators]:
    api.fit_index(index_path, api.ClosedOptions(space=space), model=ModelSpec(device="cpu", dtype="fp32"))
    index = Index.open(index_path)
    return index, Operators.from_index(index)


def test_a_listed_class_is_all_it_takes(index_path: Path, trained: Path) -> None:
    """Its gates are (F + γI)⁻¹ D⁻¹ M G with gradients taken by autograd through the steered model, and a
    document of the corpus is what a query of its own text finds."""
    index, operators = train(index_path, "random-projection")
    assert operators.space_name == "random-projection"
    assert operators.gate_size == RANK**2
    session = api.Session.open(index_path, model=ModelSpec(device="cpu", dtype="fp32"))
    model, chunks = session.model, ChunkReader(index)
    settings = resolve_settings(api.ClosedOptions(space="random-projection"), model, index)
    (space,) = fit_spaces(model, chunks, settings).spaces
    torch.testing.assert_close(space.P, operators.spaces[0].P)

    def gradient(ids: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        gates = torch.zeros(1, space.gate_size, requires_grad=True)
        hidden = model.hidden(ids, settings.layer)
        state = hidden + space(hidden, gates)
        logits = model.logits(model.continue_from(state, settings.layer))[0, :-1]
        losses = torch.nn.functional.cross_entropy(logits.float(), labels, reduction="none")
        (found,) = torch.autograd.grad(-(losses * weights).sum() / weights.sum().clamp_min(1), gates)
        return found[0]

    sums, rows = torch.zeros(index.n_subsets, space.gate_size), []
    columns = np.asarray(index.array("design/columns")).astype(np.int64)
    for chunk in range(index.n_chunks):
        batch = chunks.batch(np.asarray([chunk]))
        weights, scored = batch.weights[0, 1:], float(batch.scored[0])
        true = gradient(batch.ids, batch.ids[0, 1:], weights)
        sums[columns[chunk]] += true * scored * chunks.n_chunks / chunks.scored_tokens()
        with torch.no_grad():
            final = model.continue_from(model.hidden(batch.ids, settings.layer), settings.layer)
            cumulative = model.logits(final)[0, :-1].float().softmax(-1).cumsum(-1)
        uniform = torch.from_numpy(label_uniforms(settings.seed, batch))[0, 1:, None]
        threshold = uniform.to(cumulative.dtype) * cumulative[:, -1:]
        drawn = torch.searchsorted(cumulative, threshold, right=True)[:, 0].clamp_max(model.vocab_size - 1)
        rows.append(gradient(batch.ids, drawn, weights) * scored**0.5)
    sizes = np.bincount(columns.reshape(-1), minlength=index.n_subsets)
    mean = sums / torch.from_numpy(np.maximum(sizes, 1))[:, None]
    R = torch.stack(rows).double()
    fisher = R.T @ R / len(R)
    expected = solve_gates(mean, fisher, damping=settings.damping, n_rows=len(R)).numpy()
    assert np.corrcoef(expected.ravel(), np.asarray(operators.gates[0]).ravel())[0, 1] > 0.999

    documents = [json.loads(line) for line in (trained / "corpus.jsonl").read_text().splitlines()]
    first = 0
    for document in documents[:6]:
        beginning, end = document["text"][:40], document["text"][40:120]
        query = api.as_query(model, beginning, response=end)
        answer = session.query(query)
        responses = measure_linear(SteeredModel.of(model, operators), query.batch())[0]
        np.testing.assert_allclose(
            answer.responses, responses, rtol=1e-4, atol=1e-6 * np.abs(responses).max()
        )
        best = answer.supporters[0].document
        first += answer.document_ids[best] == document["id"]
    assert first >= 5


def test_a_package_adds_spaces_and_methods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is installed: its modules, and the entry points of its distribution."""
    from stride_cli.operators import spaces
    from stride_cli.research.methods import registry

    (tmp_path / "own_package.py").write_text(
        "from stride_cli.operators.residual_spaces import ResidualSpace\n"
        "from stride_cli.research.methods.chance import Chance\n"
        "class OwnSpace(ResidualSpace):\n    name = 'own-space'\n"
        "class OwnMethod(Chance):\n    pass\n"
    )
    about = tmp_path / "own_package-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Name: own-package\nVersion: 1.0\n")
    points = (
        "[stride.spaces]\nown-space = own_package:OwnSpace\n[stride.methods]\nown = own_package:OwnMethod\n"
    )
    (about / "entry_points.txt").write_text(points)
    with pytest.raises(api.UsageError, match="own-space"):
        spaces.parse_space("own-space+logit")
    with pytest.raises(KeyError):  # of an index whose package is not there: `Operators` says what to do
        spaces.space_from_arrays("own-space", {})
    monkeypatch.setattr(spaces, "SPACES", dict(spaces.SPACES))
    monkeypatch.syspath_prepend(tmp_path)
    assert spaces.parse_space("own-space+logit") == ("own-space", "logit")
    assert [each.__name__ for each in spaces.space_classes(["own-space"])] == ["OwnSpace"]
    monkeypatch.setattr(registry, "METHODS", registry.listed())
    method = registry.open_method("own")
    assert type(method).__name__ == "OwnMethod" and method.name == "own"
