"""The loop learns, repeats itself bit for bit, and can be cut anywhere."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stride_cli.corpus.chunking import Chunk
from stride_cli.models.language.language_recipe import Architecture, Recipe
from stride_cli.training.initial_model import initial_model
from stride_cli.training.language_loop import mean_loss, train
from stride_cli.training.runs import count_steps
from tests.stride_cli.models.language.test_language_recipe import RECIPE

BATCH_TOKENS = 60


def some_chunks(n: int = 24) -> list[Chunk]:
    random = np.random.default_rng(3)
    chunks = []
    for _ in range(n):
        tokens = random.integers(4, 50, random.integers(5, 20)).astype(np.int32)
        chunks.append(Chunk(tokens, 1, None))
    return chunks


def a_recipe(chunks: Sequence[Chunk], epochs: float = 5, **changes: Any) -> Recipe:
    epochs, steps = count_steps(chunks, epochs=epochs, steps=None, batch_tokens=BATCH_TOKENS, seed=0)
    recipe = dataclasses.replace(
        RECIPE, block_size=32, epochs=epochs, steps=steps, batch_tokens=BATCH_TOKENS, warmup=0.05,
        final_lr=0.05, architecture=Architecture(layers=2, width=16, heads=2, vocab=50, context=32),
    )  # fmt: skip
    return dataclasses.replace(recipe, **changes)


def same_weights(a: Any, b: Any) -> bool:
    return all(
        torch.equal(p, q) for p, q in zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    )


class _Stop(Exception):
    pass


class StopAt:
    """A ticker that ends the loop after some steps, as a kill would."""

    def __init__(self, step: int) -> None:
        self.left = step

    def advance(self, amount: float = 1) -> None:
        self.left -= 1
        if self.left == 0:
            raise _Stop

    def describe(self, text: str) -> None:
        pass


@pytest.mark.parametrize(
    ("optimizer", "schedule"), [("muon+adamw", "linear"), ("adamw", "cosine"), ("adamw", "constant")]
)
def test_the_loss_falls(optimizer: str, schedule: str) -> None:
    chunks = some_chunks()
    recipe = a_recipe(chunks, epochs=15, optimizer=optimizer, schedule=schedule)
    model = initial_model(recipe)
    before = mean_loss(model, chunks, recipe)
    steps: list[int] = []
    result = train(model, chunks, recipe, after_step=steps.append)
    after = mean_loss(model, chunks, recipe)
    assert steps == list(range(1, recipe.steps + 1))
    assert before == pytest.approx(np.log(50), rel=0.1)
    assert after < 0.7 * before
    assert result.steps == recipe.steps == result.log[-1]["step"]
    assert result.log[0]["loss"] == pytest.approx(before, rel=0.1)
    assert result.tokens >= 14 * sum(chunk.n_scored for chunk in chunks)


@pytest.mark.parametrize(("cut", "dtype"), [(1, "fp32"), (7, "fp32"), (11, "bf16")])
def test_resumed_equals_uninterrupted(tmp_path: Path, cut: int, dtype: str) -> None:
    chunks = some_chunks()
    recipe = a_recipe(chunks, epochs=2.5, dtype=dtype)
    whole = initial_model(recipe)
    wanted = train(whole, chunks, recipe)
    state = tmp_path / "state.pt"
    with pytest.raises(_Stop):
        train(initial_model(recipe), chunks, recipe, kept=(state, 0), ticker=StopAt(cut + 1))
    assert state.exists()
    resumed = initial_model(recipe)
    found = train(resumed, chunks, recipe, kept=(state, 20))
    assert same_weights(whole, resumed)
    assert (found.log, found.loss, found.tokens) == (wanted.log, wanted.loss, wanted.tokens)


def test_a_subset_sees_only_its_chunks() -> None:
    chunks = some_chunks()
    recipe = a_recipe(chunks, epochs=4)
    mask = np.arange(len(chunks)) % 2 == 0
    first = initial_model(recipe)
    result = train(first, chunks, recipe, subset=mask)
    # what is outside can be anything (its lengths decide the order of all)
    changed = [
        chunk if mask[i] else Chunk(np.zeros_like(chunk.tokens), 1, None) for i, chunk in enumerate(chunks)
    ]
    second = initial_model(recipe)
    train(second, changed, recipe, subset=np.flatnonzero(mask))
    assert same_weights(first, second)
    # as many passes over the subset as over all
    inside = sum(chunk.n_scored for chunk, member in zip(chunks, mask, strict=True) if member)
    assert result.tokens == pytest.approx(4 * inside, rel=0.15)
    assert mean_loss(first, [c for c, m in zip(chunks, mask, strict=True) if m], recipe) < mean_loss(
        first, [c for c, m in zip(chunks, mask, strict=True) if not m], recipe
    )


def test_seeds() -> None:
    chunks = some_chunks()
    recipe = a_recipe(chunks)
    torch.manual_seed(5)
    first = initial_model(recipe)
    torch.manual_seed(6)
    assert same_weights(first, initial_model(recipe))
    assert not same_weights(first, initial_model(recipe.with_seed(1)))


@pytest.mark.parametrize("optimizer", ["muon+adamw", "adamw"])
def test_weights_decay_in_the_blocks_matrices_alone(optimizer: str) -> None:
    """The embedding of a token that the corpus does not have has no gradient, and stays as it was."""
    chunks = some_chunks()
    recipe = a_recipe(chunks, epochs=2, optimizer=optimizer)
    start, plain, decayed = (initial_model(recipe) for _ in range(3))
    train(plain, chunks, recipe)
    train(decayed, chunks, dataclasses.replace(recipe, weight_decay=2.0))
    before, after = (model.get_input_embeddings().weight.detach() for model in (start, decayed))
    assert torch.equal(after[:4], before[:4]) and not torch.equal(after[4:], before[4:])
    sizes = [
        {name: float(p.detach().norm()) for name, p in model.named_parameters() if "proj" in name}
        for model in (decayed, plain)
    ]
    assert sizes[0] and all(sizes[0][name] < sizes[1][name] for name in sizes[0])


def test_the_mean_loss_is_that_of_tokens_not_of_batches() -> None:
    chunks = some_chunks()
    recipe = a_recipe(chunks)
    model = initial_model(recipe)
    model.lm_head.weight.data.mul_(30)
    each = []
    for chunk in chunks:
        ids = torch.from_numpy(chunk.tokens.astype(np.int64))[None]
        with torch.no_grad():
            logits = model(ids).logits[0, :-1].double()
        each.append(torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none"))
    assert mean_loss(model, chunks, recipe) == pytest.approx(float(torch.cat(each).mean()), rel=1e-5)
