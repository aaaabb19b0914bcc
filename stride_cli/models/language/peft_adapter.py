"""LoRA adapters that PEFT saved: put on their base model, then added to its weights.

What is attributed is W + (α/r)·B·A, the model that answers; what training moved of it are the layers that the
adapter is on, and nothing else.
"""

from __future__ import annotations

from typing import Any

import torch

from stride_cli.errors import ModelError, first_line, require_extra
from stride_cli.models.language.files import Source, weight_files


def with_adapter(base: Any, source: Source) -> Any:
    """The base model with an adapter added to its weights, a plain model of transformers.

    Its attribute ``adapted_layers`` holds the names of the layers that the adapter is on.

    Parameters
    ----------
    base : PreTrainedModel      is changed
    source : Source             of the adapter

    Raises
    ------
    ModelError             weights that cannot be read, or are not of this base: layers that it does not have,
                           of another shape, or too few or too many
    MissingExtraError      without the package peft
    """
    try:
        from peft import PeftModel, get_peft_model_state_dict
        from peft.utils import load_peft_weights
    except ImportError:
        raise require_extra("peft", "peft") from None
    weight_files(source.given)  # refused where it has none: peft would ask the hub
    adapter = source.directory
    assert source.base is not None
    other = f"give the model that it was trained on: --model BASE --adapter {source.given}"
    try:
        stored = load_peft_weights(str(adapter), device="cpu")
    except Exception as error:  # safetensors and torch have many
        raise ModelError(
            f"the weights of adapter '{source.given}' cannot be read: {first_line(error)}",
            fix="copy adapter_config.json and adapter_model.safetensors again",
        ) from error
    try:
        model = PeftModel.from_pretrained(base, str(adapter), local_files_only=True)
    except Exception as error:
        raise ModelError(
            f"adapter '{source.given}' does not fit its base model '{source.base.given}': {_reason(error)}",
            fix=other,
        ) from error
    there = get_peft_model_state_dict(model, save_embedding_layers=False)
    lacking, surplus = there.keys() - stored.keys(), stored.keys() - there.keys()
    for what, keys in (("lacks", lacking), ("has, beside", surplus)):
        names = sorted(key for key in keys if ".lora_" in key)
        if names:
            raise ModelError(
                f"adapter '{source.given}' does not fit its base model '{source.base.given}': it {what} "
                f"{len(names)} low-rank parts of that model's layers, {names[0]}"
                + (" …" if len(names) > 1 else ""),
                fix=other,
            )
    adapted = frozenset(
        name.removeprefix("base_model.model.")
        for name, module in model.named_modules()
        if hasattr(module, "base_layer") and hasattr(module, "get_delta_weight")
    )
    with torch.no_grad():
        merged = model.merge_and_unload()
    merged.adapted_layers = adapted
    return merged


def _reason(error: Exception) -> str:
    """The line of an error that says most: torch lists sizes that differ after a heading."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next((line for line in lines if line.startswith("size mismatch")), first_line(error))
