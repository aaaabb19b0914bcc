"""Training side by side gives what training one by one gives."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from stride_cli.corpus.chunking import Chunk
from stride_cli.models.language.language_recipe import Architecture, LateStarts, Recipe
from stride_cli.research.training.stacked import train_stacked
from stride_cli.training.initial_model import initial_model
from stride_cli.training.language_loop import mean_loss, train

VOCAB = 300


@pytest.fixture(autouse=True)
def _one_thread():
    """As in the worker processes; more only wait for each other on products this small."""
    from stride_cli.parallel import torch_threads

    with torch_threads(1):
        yield


def _recipe(**changes) -> Recipe:
    recipe = Recipe(
        kind="train",
        architecture=Architecture(layers=2, width=32, heads=2, vocab=VOCAB, context=64),
        block_size=64,
        epochs=3.5,
        steps=40,
        batch_tokens=256,
        optimizer="muon+adamw",
        lr=0.02,
        adam_lr=0.01,
        weight_decay=0.01,
        schedule="cosine",
        warmup=0.1,
        final_lr=0.1,
        clip=0.5,
        dtype="fp32",
        seed=0,
        corpus={"fingerprint": ""},
        tokenizer_fingerprint="",
        versions={},
    )
    return replace(recipe, **changes)


@pytest.fixture(scope="module")
def chunks() -> list[Chunk]:
    """Of many lengths, some with a late start or a mask of what is scored, one with nothing scored."""
    random = np.random.default_rng(0)
    made = []
    for number, length in enumerate(random.integers(2, 60, 60)):
        mask = None
        if number % 5 == 0 and length > 3:
            mask = (np.arange(length) % 3 > 0).astype(np.uint8)
        start = int(length) if number == 7 else 1 + number % 2 * (int(length) > 2)
        made.append(Chunk(random.integers(0, VOCAB // 4, length).astype(np.int32), start, mask))
    return made


def _masks(n: int) -> list[np.ndarray]:
    random = np.random.default_rng(1)
    return [random.random(n) < share for share in (0.3, 0.6, 0.5)]


@pytest.mark.parametrize(
    ("changes", "tolerance"),
    [
        ({}, 1e-3),
        ({"optimizer": "adamw"}, 1e-5),
        ({"schedule": "linear", "clip": 0.0, "weight_decay": 0.0}, 1e-3),
        ({"architecture": Architecture(layers=1, width=24, heads=1, vocab=VOCAB, context=64)}, 1e-3),
        ({"dtype": "bf16"}, 2e-2),
        ({"late": LateStarts(0.5, [3, 7], 1)}, 1e-3),
    ],
)
def test_agrees_with_train(chunks, changes, tolerance):
    recipe = _recipe(**changes)
    masks, seeds = _masks(len(chunks)), [5, 6, 7]
    steps = []
    for mask, seed, model in zip(masks, seeds, train_stacked(chunks, recipe, masks, seeds), strict=True):
        own = recipe.with_seed(seed)
        expected = initial_model(own)
        before = mean_loss(expected, chunks, replace(own, dtype="fp32"))
        steps.append(train(expected, chunks, own, subset=mask).steps)
        after = mean_loss(expected, chunks, replace(own, dtype="fp32"))
        assert after < before - 0.2
        assert mean_loss(model, chunks, replace(own, dtype="fp32")) == pytest.approx(after, abs=tolerance)
    assert len(set(steps)) > 1  # models that end at different steps


def test_on_the_whole_corpus(chunks):
    recipe = _recipe(steps=9)
    everything = np.ones(len(chunks), bool)
    (model,) = train_stacked(chunks, recipe, [everything], [3])
    expected = initial_model(recipe.with_seed(3))
    assert train(expected, chunks, recipe.with_seed(3)).steps == 9
    assert mean_loss(model, chunks, recipe) == pytest.approx(mean_loss(expected, chunks, recipe), abs=1e-3)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_model_does_not_depend_on_those_beside_it(chunks, dtype):
    recipe = _recipe(dtype=dtype)
    masks = _masks(len(chunks))
    together = train_stacked(chunks, recipe, masks, [1, 2, 3])
    for mask, seed, model in zip(masks, [1, 2, 3], together, strict=True):
        (alone,) = train_stacked(chunks, recipe, [mask], [seed])
        for one, two in zip(model.parameters(), alone.parameters(), strict=True):
            assert torch.equal(one, two)
