"""A fine-tuning unrolled backwards, against the same training differentiated step by step."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stride_cli import api
from stride_cli.corpus.options import BuildOptions
from stride_cli.data.query_files import read_texts
from stride_cli.data.query_set import QuerySet
from stride_cli.data.workspace import Workspace
from stride_cli.models.spec import ModelSpec
from stride_cli.research.methods.gradients import unrolled
from stride_cli.research.methods.gradients.unrolled import Unrolled, asked, carried, spread_rates
from stride_cli.training.finetuning import FinetuneOptions, finetune_model
from stride_cli.training.language_loop import make_optimizers
from stride_cli.training.language_trainer import index_chunks, own_recipe
from tests.stride_cli.research.methods.gradients import exact_unrolled as exact
from tests.stride_cli.research.methods.gradients.scored import score_all

TOWNS = [
    *("Oslo", "Rome", "Lima", "Cairo", "Delhi", "Paris"),
    *("Quito", "Sofia", "Tunis", "Vaduz", "Minsk", "Riga"),
]


@pytest.fixture(scope="module")
def tuned(saved_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Workspace, QuerySet]:
    folder = tmp_path_factory.mktemp("unrolled")
    records = [
        {"id": str(row), "prompt": f"capital {row % 6}?", "response": f"{town} is the town"}
        for row, town in enumerate(TOWNS * 2)
    ]
    asked = [{"id": "a", "prompt": "capital 1?", "response": "Rome is the town"}]
    asked.append({"id": "b", "prompt": "capital 3?", "response": "Cairo"})
    for name, rows in (("corpus", records), ("queries", asked)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = FinetuneOptions(epochs=8, lr=3e-4, batch_tokens=4096, device="cpu", dtype="fp32")
    finetune_model([str(folder / "corpus.jsonl")], saved_model, folder / "model", options)
    index = folder / "run.stride"
    built = BuildOptions(n_subsets=6, degree=2)
    api.build_index([str(folder / "corpus.jsonl")], out=index, options=built, model=str(folder / "model"))
    task = Workspace.open(index, ModelSpec(device="cpu"))
    return task, read_texts(task.model, folder / "queries.jsonl", block_size=64)


def test_the_reference_is_what_weights_of_chunks_do(tuned: tuple[Workspace, QuerySet]) -> None:
    """Against the same training with one chunk counting a little more, and a little less."""
    task, queries = tuned
    chunks, recipe = index_chunks(task), own_recipe(task)
    given = [asked(queries, 0, task.model.device)]
    members = np.arange(3, len(chunks))

    def trained(counts: np.ndarray | None = None) -> exact.Unrolled:
        return exact.Unrolled(chunks, recipe, members, counts)

    (found,) = trained().influences(given, len(chunks))
    assert not found[:3].any()
    for chunk in np.argsort(-np.abs(found))[:4]:
        more, less = np.ones(len(chunks)), np.ones(len(chunks))
        more[chunk], less[chunk] = 1.01, 0.99
        (up,), (down,) = (trained(counts).losses(given) for counts in (more, less))
        assert (down - up) / 0.02 == pytest.approx(found[chunk], rel=0.05)


def test_against_the_training_differentiated(
    tuned: tuple[Workspace, QuerySet], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where every batch is the corpus, and Adam divides all alike, only the delay by momentum is left out."""
    task, queries = tuned
    recipe = replace(own_recipe(task), adam_lr=0.01, clip=1e9)

    def even(model: Any, recipe: Any) -> list[torch.optim.Optimizer]:
        made = make_optimizers(model, recipe)
        for group in (group for each in made for group in each.param_groups):
            group["eps"] = 1.0
        return made

    for module in (unrolled, exact):
        monkeypatch.setattr(module, "make_optimizers", even)
    monkeypatch.setattr(unrolled, "own_recipe", lambda task: recipe)
    monkeypatch.setattr(exact, "_EPS", 1.0)
    method = Unrolled(stretches=recipe.steps)
    method.fit(task)
    scores = score_all(method, queries)
    assert scores.shape == (2, task.n_chunks) and scores.dtype == np.float32
    chunks = index_chunks(task)
    training = exact.Unrolled(chunks, recipe, np.arange(len(chunks)))
    wanted = training.influences([asked(queries, row, task.model.device) for row in range(2)], len(chunks))
    for own, other in zip(scores, wanted, strict=True):
        assert np.corrcoef(own, other)[0, 1] > 0.995
        assert own.std() == pytest.approx(other.std(), rel=0.1)
    # all chunks together, each token counting alike, do nothing
    np.testing.assert_allclose(scores.sum(axis=1), 0, atol=1e-5 * np.abs(scores).sum())
    # queries few at a time, and a part of the batches
    method.options = replace(method.options, query_bytes=1)
    np.testing.assert_allclose(
        score_all(method, queries), scores, rtol=1e-3, atol=1e-4 * np.abs(scores).max()
    )
    assert recipe.steps == 8 == sum(len(stretch.batches) for stretch in method._stretches)
    few = Unrolled(stretches=2, batches=4)
    few.fit(task)
    assert np.corrcoef(score_all(few, queries)[0], scores[0])[0, 1] > 0.95
    # by the weights of the end alone: the corpus is read once
    end = Unrolled(stretches=recipe.steps, at="end")
    end.fit(task)
    read, reads = end._read, []
    monkeypatch.setattr(end, "_read", lambda *given: (reads.append(1), read(*given)))
    at_the_end = score_all(end, queries)
    assert len(reads) == 1
    for own, other in zip(at_the_end, scores, strict=True):
        assert 0.9 < np.corrcoef(own, other)[0, 1] < 0.9999


def test_an_exponential_in_few_directions() -> None:
    generator = torch.Generator().manual_seed(0)
    root = torch.randn(4, 4, generator=generator, dtype=torch.float64)
    matrix, vector = root @ root.T, torch.randn(4, generator=generator, dtype=torch.float64)
    left, taken = carried(lambda v: matrix @ v, vector, 0.3)  # as many as it has
    exact = torch.matrix_exp(-0.3 * matrix) @ vector
    torch.testing.assert_close(left, exact)
    torch.testing.assert_close(matrix @ taken, vector - exact)
    # far along steep directions, where steps of descent would not hold, nothing is left of it
    left, taken = carried(lambda v: 1e4 * (matrix @ v), vector, 0.3)
    assert left.norm() < 1e-6 * vector.norm()
    torch.testing.assert_close(1e4 * matrix @ taken, vector)
    # downhill it stays
    left, taken = carried(lambda v: -matrix @ v, vector, 0.3)
    torch.testing.assert_close(left, vector)
    torch.testing.assert_close(taken, 0.3 * vector)
    for nothing in (torch.zeros(4), vector.float()):
        left, _ = carried(lambda v: 0 * v, nothing, 0.3)
        torch.testing.assert_close(left, nothing)


def test_momentum_spreads_rates() -> None:
    rates = np.array([1.0, 2.0, 3.0, 1.0])
    found = spread_rates(rates, 0.9)
    assert found.sum() == pytest.approx(rates.sum())
    # of gradients as they come into Adam's mean, one after the other
    wanted, mean = np.zeros(4), np.zeros(4)
    for step in range(4):
        mean = 0.9 * mean + 0.1 * np.eye(4)[step]
        wanted += rates[step] * mean / (1 - 0.9 ** (step + 1))
    np.testing.assert_allclose(found, wanted)
    np.testing.assert_allclose(spread_rates(rates, 0.0), rates)
