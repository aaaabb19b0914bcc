"""Projections that `StrideCallback` gathers, against gradients of single examples by autograd."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stride_cli.errors import ModelError, UsageError
from stride_cli.operators.layer_projections import (
    GATHERED,
    GatheredProjections,
    ProjectedLayers,
    layer_numbers,
)
from tests.tiny_models import random_model, tiny_nanochat

pytest.importorskip("accelerate")
datasets = pytest.importorskip("datasets")
trains = pytest.mark.slow  # to import the Trainer and what comes with it takes five seconds
EXAMPLES, STEPS, BYTES = 10, 6, 64


def pairs(vocabulary: int, *, masked: bool = True) -> Any:
    """Examples of different lengths, of which the first tokens are not scored."""
    random = np.random.default_rng(0)
    rows = []
    for number in range(EXAMPLES):
        ids = random.integers(3, vocabulary, 6 + number).tolist()
        start = number % 4 if masked else 0
        rows.append({"input_ids": ids, "labels": [-100] * start + ids[start:], "text": f"example {number}"})
    return datasets.Dataset.from_list(rows)


def make_trainer(folder: Path, tokenizer: Any, data: Any, callback: Any, model: Any, **changes: Any) -> Any:
    """With `seen`: of every batch its examples, its step's learning rate, and the weights then."""
    from transformers import DataCollatorForSeq2Seq, Trainer, TrainerCallback, TrainingArguments

    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.pad_token = tokenizer.bos_token
    tokenizer.padding_side = changes.pop("side", "right")
    compute_loss = changes.pop("compute_loss", None)
    collator = DataCollatorForSeq2Seq(tokenizer)
    known = {tuple(ids): row for row, ids in enumerate(data["input_ids"])}

    class Seen(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            trainer.rates.append(given["optimizer"].param_groups[0]["lr"])
            trainer.weights.append(copy.deepcopy(given["model"].state_dict()))

    def collate(features: list[dict]) -> Any:
        batch = collator([{name: each[name] for name in ("input_ids", "labels")} for each in features])
        trainer.batches.append(([known[tuple(each["input_ids"])] for each in features], batch))
        return batch

    settings = {"max_steps": STEPS, "per_device_train_batch_size": 2, "learning_rate": 1e-2, "seed": 3}
    settings |= {"save_strategy": "no", "lr_scheduler_type": "linear"} | changes
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(folder / "out"), report_to=[], use_cpu=True, disable_tqdm=True, logging_strategy="no",
            **settings,
        ),
        train_dataset=data,
        processing_class=tokenizer,
        data_collator=collate,
        compute_loss_func=compute_loss,
        callbacks=[callback, Seen()],
    )  # fmt: skip
    trainer.rates, trainer.weights, trainer.batches = [], [], []
    return trainer


def by_autograd(
    model: Any, trainer: Any, layers: ProjectedLayers, together: int = 1, steps: range = range(STEPS)
) -> np.ndarray:
    """−Σ_steps lr Qᵀ (∂ loss summed over scored tokens / ∂W) P, example by example, weight by weight."""
    found = np.zeros((EXAMPLES, layers.size), np.float32)
    model = copy.deepcopy(model).eval()
    sides = [layers.sides(group) for group in range(len(layers.groups))]
    for step in steps:
        model.load_state_dict(trainer.weights[step])
        for batch in trainer.batches[step * together : (step + 1) * together]:
            for place, row in enumerate(batch[0]):
                labels = batch[1]["labels"][place]
                own = {name: batch[1][name][place : place + 1] for name in ("input_ids", "attention_mask")}
                model.zero_grad()
                logits = model(**own).logits[0, :-1]
                torch.nn.functional.cross_entropy(logits, labels[1:], reduction="sum").backward()
                for names, span, (P, Qs) in zip(layers.groups, layers.spans, sides, strict=True):
                    for name, Q in zip(names, Qs, strict=True):
                        layer = model.get_submodule(name)
                        gradient = layer.weight.grad if hasattr(layer, "in_features") else layer.weight.grad.T
                        found[row, span] -= trainer.rates[step] * (Q.T @ gradient @ P).flatten().numpy()
    return found


@pytest.fixture
def sums(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What was gathered, before signs are made of it."""
    kept: dict[str, Any] = {}
    make = GatheredProjections.of

    def keeping(layers: ProjectedLayers, found: np.ndarray, *rest: Any) -> GatheredProjections:
        kept.update(layers=layers, sums=found.copy())
        return make(layers, found, *rest)

    monkeypatch.setattr(GatheredProjections, "of", keeping)
    return kept


WAYS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "accumulated": {"gradient_accumulation_steps": 3, "max_steps": 4},
    "padded on the left": {"side": "left"},
    "checkpointed": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
    "checkpointed, reentrant": {
        "gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True},
    },
}  # fmt: skip


@trains
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["Llama", "GPT2"])
def test_sums_are_those_of_single_examples_gradients(way, name, tokenizer, tmp_path: Path, sums) -> None:
    from stride_cli import StrideCallback

    model, changes = random_model(name).float(), dict(WAYS[way])
    for key in ("attn_pdrop", "embd_pdrop", "resid_pdrop", "attention_dropout"):
        if hasattr(model.config, key):
            setattr(model.config, key, 0.0)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    data = pairs(min(len(tokenizer), model.config.vocab_size))
    callback = StrideCallback(tmp_path / "run", projections=BYTES)
    trainer = make_trainer(tmp_path, tokenizer, data, callback, model, **changes)
    original = copy.deepcopy(model)
    trainer.train()
    steps = range(trainer.state.max_steps)
    together = changes.get("gradient_accumulation_steps", 1)
    if together > 1:  # five batches a pass: three, and two
        ends, seen = [0, 3, 5, 8, 10], trainer.batches
        expected = np.zeros_like(sums["sums"])
        for step in steps:
            part = copy.copy(trainer)
            part.batches = seen[ends[step] : ends[step + 1]]
            part.weights, part.rates = [trainer.weights[step]], [trainer.rates[step]]
            expected += by_autograd(original, part, sums["layers"], len(part.batches), range(1))
    else:
        expected = by_autograd(original, trainer, sums["layers"], 1, steps)
    assert np.abs(expected).max() > 1e-3
    np.testing.assert_allclose(sums["sums"], expected, rtol=2e-3, atol=2e-4 * np.abs(expected).max())
    kept = GatheredProjections.load(tmp_path / "run" / GATHERED)
    assert kept.codes.shape == (EXAMPLES, BYTES) and (kept.step > 0).all()
