"""A recipe comes back from disk as it was, or not at all."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from stride_cli.errors import ModelError
from stride_cli.models.language.language_recipe import (
    FILE_NAME,
    Architecture,
    LateStarts,
    Recipe,
    read_recipe,
    versions,
)

RECIPE = Recipe(
    kind="train",
    architecture=Architecture(layers=2, width=16, heads=2, vocab=300, context=64),
    block_size=64,
    epochs=3.5,
    steps=12,
    batch_tokens=512,
    optimizer="muon+adamw",
    lr=0.02,
    adam_lr=0.03,
    weight_decay=0.0,
    schedule="linear",
    warmup=0.02,
    final_lr=0.02,
    clip=1.0,
    dtype="fp32",
    seed=0,
    corpus={"documents": 3, "fingerprint": "ab"},
    tokenizer_fingerprint="cd",
    versions=versions(),
)


def test_round_trip(tmp_path: Path) -> None:
    assert read_recipe(tmp_path) is None
    (tmp_path / FILE_NAME).write_text(RECIPE.to_json())
    assert read_recipe(tmp_path) == RECIPE
    late = dataclasses.replace(RECIPE, late=LateStarts(0.5, [3, 14], 0))
    (tmp_path / FILE_NAME).write_text(late.to_json())
    assert read_recipe(tmp_path) == late
    (tmp_path / FILE_NAME).write_text(dataclasses.replace(RECIPE, lora_layers=5).to_json())  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="lora_layers is 5"):
        read_recipe(tmp_path)
