"""Make the model that a training starts from."""

from __future__ import annotations

from typing import Any

from stride_cli.errors import ModelError
from stride_cli.models.language.checkpoint import load_weights
from stride_cli.models.language.files import refuse_download
from stride_cli.models.language.language_recipe import Recipe
from stride_cli.models.language.lora import add_lora
from stride_cli.models.language.nanochat import new_own
from stride_cli.models.loading import model_fingerprint
from stride_cli.permissions import Permissions


def initial_model(recipe: Recipe, permissions: Permissions = Permissions()) -> Any:
    """Make the model that a recipe starts from: initial weights by its seed, or a fine-tuning's base model
    with fresh LoRA matrices. Parameters to be trained require gradients; raises as `base_weights`."""
    if recipe.architecture is not None:
        return new_own(recipe.architecture, seed=recipe.seed)
    return make_trainable(base_weights(recipe, permissions), recipe)


def base_weights(recipe: Recipe, permissions: Permissions = Permissions()) -> Any:
    """Load the model that a fine-tuning starts from, on the CPU in fp32; ModelError: it is another now."""
    assert recipe.base is not None
    refuse_download(recipe.base, permissions, named_by="the recipe of the model")
    found = model_fingerprint(recipe.base)
    if found != recipe.base_fingerprint:
        raise ModelError(
            f"'{recipe.base}' has fingerprint {found}, the recipe's base model {recipe.base_fingerprint}",
            fix="put the original base model back there",
        )
    return load_weights(recipe.base)


def make_trainable(model: Any, recipe: Recipe) -> Any:
    """Let the model's parameters require gradients, or fresh LoRA matrices where the recipe has a rank."""
    if recipe.lora_rank:
        add_lora(model, rank=recipe.lora_rank, seed=recipe.seed)
    else:
        for parameter in model.parameters():
            parameter.requires_grad_(True)
    return model
