"""What a checkpoint is, in one record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from stride_cli.models.language.language_recipe import read_recipe
from stride_cli.models.loading import load_model

if TYPE_CHECKING:
    from stride_cli.schema.model_records import ModelInfoRecord


def describe_model(path_or_id: str | Path) -> ModelInfoRecord:
    """Load a checkpoint, which checks it whole, and describe it.

    Returns
    -------
    dict      a ``stride.model_info/1``

    Raises
    ------
    ModelError
        As from `load_model`; or the recipe cannot be read.
    """
    recipe = read_recipe(path_or_id)
    model = load_model(path_or_id, device="cpu", dtype="fp32")
    kept = sorted(str(path) for path in Path(path_or_id).glob("checkpoints/step-*"))
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
        "checkpoints": kept,
        "recipe": None if recipe is None else json.loads(recipe.to_json()),
    }
