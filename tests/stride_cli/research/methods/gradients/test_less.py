from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from stride_cli.data.workspace import Workspace
from stride_cli.errors import ModelError
from stride_cli.models.spec import ModelSpec
from stride_cli.research.methods.gradients import projection
from stride_cli.research.methods.gradients.less import LESS
from stride_cli.research.methods.gradients.warmup import warm_up
from tests.stride_cli.research.methods.gradients.scored import scored


def _cosine(a, b):
    return (a / np.linalg.norm(a, axis=1)[:, None]) @ (b / np.linalg.norm(b, axis=1)[:, None]).T


def test_large_dim_is_the_cosine_of_gradients(softmax, monkeypatch):
    train, held = softmax.gradients[: softmax.n].numpy(), softmax.gradients[softmax.n :].numpy()
    for dense_bytes in (projection.DENSE_BYTES, 0):
        monkeypatch.setattr(projection, "DENSE_BYTES", dense_bytes)
        found = scored(LESS(dim=20_000), softmax.task, softmax.queries)
        np.testing.assert_allclose(found, _cosine(held, train), atol=0.05)


def test_language_model_against_autograd(nanochat_task, queries, autograd):
    parameters = nanochat_task.model.model.named_parameters()
    names = [name for name, parameter in parameters if "layers" in name and parameter.ndim == 2]
    chunks = [nanochat_task.chunks.chunk(row) for row in range(nanochat_task.n_chunks)]
    train = autograd(nanochat_task, chunks, names)
    held = autograd(nanochat_task, list(zip(queries.ids, queries.weights, strict=True)), names)
    expected = _cosine(held, train)
    found = scored(LESS(dim=8192, form="sgd"), nanochat_task, queries)
    np.testing.assert_allclose(found, expected, atol=0.06)
    small = scored(LESS(dim=8192, form="sgd", batch_tokens=12), nanochat_task, queries)
    np.testing.assert_allclose(small, found, rtol=1e-3, atol=1e-4)


def _lora_names(module):
    """A and B of one layer after the other, in the order of the capture."""
    return [name for name, _ in module.named_parameters() if name.endswith((".lora_a", ".lora_b"))]


@pytest.mark.parametrize("fixture", ["nanochat_task", "gpt2_task"])
def test_adapter_gradients_and_saved_moments(fixture, request, queries, autograd):
    """Against autograd in the adapter's matrices and Adam's formula, checkpoint by checkpoint."""
    task = request.getfixturevalue(fixture)
    before = {name: value.clone() for name, value in task.model.model.state_dict().items()}
    method = LESS(dim=16_384, share=0.5, epochs=2, rank=3, lr=0.01)
    found = scored(method, task, queries)
    warm = method._warm
    assert len(warm.rates) == 2 and warm.rates[0] > warm.rates[1] > 0
    places = {id(value): name for name, value in warm.capture.model.model.named_parameters()}
    names = [places[id(value)] for value in warm.parameters]
    assert names and sorted(names) == sorted(_lora_names(warm.capture.model.model))
    assert all("attn" in name for name in names)
    adapted = Workspace(task.index, warm.capture.model, task.chunks, 0)
    chunks = [task.chunks.chunk(row) for row in range(task.n_chunks)]
    asked = list(zip(queries.ids, queries.weights, strict=True))
    expected = np.zeros_like(found)
    for number, rate in enumerate(warm.rates):
        moments = warm.at(number)
        first, second = (
            torch.cat([each.flatten() for each in kept]).double().numpy()
            for kept in (moments.first, moments.second)
        )
        train, held = autograd(adapted, chunks, names), autograd(adapted, asked, names)
        (beta1, beta2), step = moments.betas, moments.steps + 1
        mean = (beta1 * first + (1 - beta1) * train) / (1 - beta1**step)
        square = (beta2 * second + (1 - beta2) * train**2) / (1 - beta2**step)
        expected += rate * _cosine(held, mean / (np.sqrt(square) + 1e-8))
    np.testing.assert_allclose(found, expected, atol=0.04 * sum(warm.rates))
    after = task.model.model.state_dict()
    assert before.keys() == after.keys(), "the task's model has no adapter"
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert method.bytes_per_chunk == 2 * 16_384 * 4


def test_the_warm_up_starts_from_the_base_of_the_recipe(tmp_path, saved_model):
    from stride_cli import api
    from stride_cli.corpus.options import BuildOptions
    from stride_cli.models.language.checkpoint import load_weights
    from stride_cli.models.language.language_recipe import FILE_NAME
    from stride_cli.training.finetuning import FinetuneOptions, finetune_model

    corpus = tmp_path / "corpus.jsonl"
    records = [{"id": str(row), "prompt": f"number {row}?", "response": "Oslo"} for row in range(12)]
    corpus.write_text("".join(json.dumps(record) + "\n" for record in records))
    tuned = tmp_path / "tuned"
    finetune_model([str(corpus)], saved_model, tuned, FinetuneOptions(epochs=2, lr=0.01, device="cpu"))
    options = BuildOptions(n_subsets=6, degree=2)
    api.build_index([str(corpus)], out=tmp_path / "index", options=options, model=str(tuned))
    task = Workspace.open(tmp_path / "index", ModelSpec(device="cpu"))
    warm = warm_up(task, share=0.5, epochs=1, rank=2, lr=None, layers=None)
    base = load_weights(saved_model).state_dict()
    own = task.model.model.state_dict()
    start = warm.capture.model.model.state_dict()
    assert all(torch.equal(start[name], value) for name, value in base.items())
    assert not all(torch.equal(own[name], value) for name, value in base.items())
    recipe = json.loads((tuned / FILE_NAME).read_text())
    (tuned / FILE_NAME).write_text(json.dumps({**recipe, "base_fingerprint": "0" * 64}))
    with pytest.raises(ModelError, match="fingerprint"):
        warm_up(task, share=0.5, epochs=1, rank=2, lr=None, layers=None)
