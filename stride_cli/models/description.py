"""Describe a checkpoint in one record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from stride_cli.models.classifier.directory import (
    Outline,
    classes_fingerprint,
    classifier_fingerprint,
    outline,
)
from stride_cli.models.kinds import kind_of
from stride_cli.models.language.language_recipe import read_recipe
from stride_cli.models.loading import load_model, model_settings

if TYPE_CHECKING:
    from stride_cli.schema.model_records import ModelInfoRecord


def describe_model(path_or_id: str | Path) -> ModelInfoRecord:
    """Load a checkpoint, which checks it whole, and describe it; code that a classifier brings is never run.

    Returns
    -------
    dict      a ``stride.model_info/1``

    Raises
    ------
    ModelError
        As from `load_model`; or the recipe cannot be read.
    """
    if kind_of(path_or_id) == "classifier" and (found := outline(path_or_id)).code:
        return _unloaded(path_or_id, found)
    recipe = read_recipe(path_or_id)
    model = load_model(path_or_id, device="cpu", dtype="fp32")
    return {
        "schema": "stride.model_info/1",
        "path": str(path_or_id),
        "architecture": model.name,
        "parameters": model.n_parameters,
        "layers": model.n_layers,
        "width": model.d_model,
        "vocabulary": model.vocab_size,
        "context": model.context_length,
        "fingerprint": model.fingerprint,
        "tokenizer_fingerprint": model.tokenizer_fingerprint,
        "settings_fingerprint": model_settings(path_or_id),
        "checkpoints": _kept(path_or_id),
        "recipe": None if recipe is None else json.loads(recipe.to_json()),
    }


def _unloaded(path: str | Path, found: Outline) -> ModelInfoRecord:
    """A classifier whose network is a Python file, by what its other files say."""
    return {
        "schema": "stride.model_info/1",
        "path": str(path),
        "architecture": "network.py (not run)",
        "parameters": found.parameters,
        "layers": None,
        "width": None,
        "vocabulary": len(found.classes),
        "context": 2,
        "fingerprint": classifier_fingerprint(path),
        "tokenizer_fingerprint": classes_fingerprint(path),
        "settings_fingerprint": None,
        "checkpoints": _kept(path),
        "recipe": None,  # as of every classifier: it is a language model's
    }


def _kept(path: str | Path) -> list[str]:
    return sorted(str(step) for step in Path(path).glob("checkpoints/step-*"))
