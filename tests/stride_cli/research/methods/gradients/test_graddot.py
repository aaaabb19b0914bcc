from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

from stride_cli.data.batches import ChunkReader
from stride_cli.data.workspace import Workspace
from stride_cli.errors import UsageError
from stride_cli.models import loading
from stride_cli.models.language.causal_lm import CausalLM
from stride_cli.models.spec import ModelSpec
from stride_cli.research.methods.gradients.graddot import GradDot, TracIn
from stride_cli.research.methods.registry import open_method
from tests.stride_cli.research.methods.gradients.scored import scored


def _matrices(task):
    linear = [name for name, module in task.model.model.named_modules() if hasattr(module, "weight")]
    names = [f"{name}.{part}" for name in linear for part in ("weight", "bias")]
    known = dict(task.model.model.named_parameters())
    skipped = ("wte", "wpe", "embed", "ln", "norm")
    return [name for name in names if name in known and not any(word in name for word in skipped)]


def _averaged(task, ids, weights):
    with torch.no_grad():
        logits = task.model.model(input_ids=torch.as_tensor(np.asarray(ids)[None].astype(np.int64))).logits[0]
    likely = logits[:-1].double().softmax(-1)[torch.arange(len(ids) - 1), ids[1:].astype(np.int64)]
    residual = 1 - likely
    return ids, weights * np.append(1.0, (0.5 * (1 + residual) / residual).numpy())


@pytest.mark.parametrize("fixture", ["nanochat_task", "gpt2_task", "long_rope_task"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "average"])
def test_equals_autograd_example_by_example(fixture, reduction, request, queries, autograd):
    task = request.getfixturevalue(fixture)
    names = _matrices(task)
    chunks = [task.chunks.chunk(row) for row in range(task.n_chunks)]
    options = {"reduction": reduction}
    if reduction == "average":  # each token times its mean residual, of a model that began knowing nothing
        chunks, options = [_averaged(task, *chunk) for chunk in chunks], {"residuals": "average"}
    expected = (
        autograd(task, list(zip(queries.ids, queries.weights, strict=True)), names)
        @ autograd(task, chunks, names, power=1.0 if reduction == "mean" else 0.0).T
    )
    found = scored(GradDot(**options, batch_tokens=50), task, queries)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("fixture", ["nanochat_task", "gpt2_task"])
def test_embeddings_where_they_are_asked_for(fixture, request, queries, autograd):
    task = request.getfixturevalue(fixture)
    embedding = task.model.model.get_input_embeddings()
    named = [name for name, module in task.model.model.named_modules() if module is embedding]
    chunks = [task.chunks.chunk(row) for row in range(task.n_chunks)]
    asked = list(zip(queries.ids, queries.weights, strict=True))
    alone = [f"{named[0]}.weight"]
    expected = [
        autograd(task, asked, names) @ autograd(task, chunks, names).T
        for names in (alone, alone + _matrices(task))
    ]
    for choice, products in zip(("head+embeddings", "all+embeddings"), expected, strict=True):
        found = scored(GradDot(layers=choice, reduction="mean", batch_tokens=50), task, queries)
        if choice.startswith("head"):
            found = found - scored(GradDot(layers="head", reduction="mean"), task, queries)
        np.testing.assert_allclose(found, products, rtol=1e-4, atol=1e-5 * np.abs(products).max())


def test_memory_changes_nothing(nanochat_task, queries):
    expected = scored(GradDot(batch_tokens=1000), nanochat_task, queries)
    for options in ({"query_bytes": 1}, {"batch_tokens": 30, "query_bytes": 40_000}):
        found = scored(GradDot(**options), nanochat_task, queries)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("spec", ["graddot:", "ekfac:layers=all,", "logra:", "trackstar:", "trak:dim=64,"])
def test_batches_padding_copies_and_another_run_change_nothing(spec, nanochat_task, queries):
    """Batches of all lengths, or of 12 tokens with smaller last ones; chunk 9 is a copy of chunk 0."""
    index = copy.copy(nanochat_task.index)
    tokens, offsets = index.arrays["corpus/tokens"].copy(), index.arrays["corpus/chunk_offsets"]
    tokens[offsets[9] : offsets[10]] = tokens[: offsets[1]]
    index.arrays = index.arrays | {"corpus/tokens": tokens}
    task = Workspace(index, nanochat_task.model, ChunkReader(index, nanochat_task.model), 0)
    methods = [open_method(f"{spec}batch_tokens={most}") for most in (1000, 12, 12)]
    whole, parts, again = (scored(method, task, queries) for method in methods)
    np.testing.assert_allclose(parts, whole, rtol=1e-4, atol=1e-5 * np.abs(whole).max())
    np.testing.assert_array_equal(parts, again)
    np.testing.assert_allclose(whole[:, 0], whole[:, 9], rtol=1e-5)
    assert np.abs(whole[:, 0] - whole[:, 1]).max() > 1e-3 * np.abs(whole).max()


def test_convolutions(make_classifier, autograd):
    torch.manual_seed(0)
    features = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, stride=2),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 3, 2, bias=False),
        nn.Flatten(),
        nn.Linear(12, 6),
        nn.ReLU(inplace=True),
    )
    head = nn.Linear(6, 4)
    inputs = torch.randn(14, 2, 6, 6)
    task, queries = make_classifier(features, head, inputs, np.arange(14) % 4, 10)
    names = [name for name, _ in task.model.model.named_parameters() if "features.1." not in name]
    chunks = [task.chunks.chunk(row) for row in range(10)]
    expected = (
        autograd(task, list(zip(queries.ids, queries.weights, strict=True)), names)
        @ autograd(task, chunks, names).T
    )
    found = scored(GradDot(batch_tokens=8), task, queries)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())


def test_tracin_finds_the_checkpoints_of_a_run(nanochat_task, queries, tmp_path, monkeypatch):
    from stride_cli.models.language.checkpoint import load_weights

    network = nanochat_task.model.model
    network.save_pretrained(tmp_path)
    weight = network.lm_head.weight
    with torch.no_grad():
        weight.mul_(0.5)
        network.save_pretrained(tmp_path / "checkpoints" / "step-000003")
        early = scored(GradDot(), nanochat_task, queries)
        weight.mul_(2)

    def load(given):
        assert (given.device, given.dtype) == ("cpu", "fp32")
        return CausalLM(load_weights(given.path))

    monkeypatch.setattr(loading, "load_model", load)  # without a tokenizer
    late = scored(GradDot(), nanochat_task, queries)
    assert not np.allclose(early, late)
    found = scored(TracIn(checkpoints=f"{tmp_path}|{tmp_path}"), nanochat_task, queries)
    np.testing.assert_allclose(found, 2 * late, rtol=1e-5)
    for spec in ("tracin:rates=1", "ekfac:rates=1"):
        with pytest.raises(UsageError, match="rates=1 is given without checkpoints"):
            scored(open_method(spec), nanochat_task, queries)
    monkeypatch.setattr(nanochat_task.model, "spec", ModelSpec(tmp_path))
    for given, expected in (({}, early + late), ({"rates": "3|0.5"}, 3 * early + 0.5 * late)):
        found = scored(TracIn(**given), nanochat_task, queries)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(scored(GradDot(), nanochat_task, queries), late)
