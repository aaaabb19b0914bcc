"""Merge the low-rank parts of a PEFT model into whole weights, without changing the model."""

from __future__ import annotations

from typing import Any

import torch

from stride_cli.errors import UsageError

_FIX = "train with LoRA of floating-point weights, or save the merged model yourself (merge_and_unload)"


def lora_rank(model: Any) -> int:
    """Read the rank of a PEFT model's low-rank parts; 0 for a model that is not PEFT's."""
    if not hasattr(model, "peft_config"):
        return 0
    return int(getattr(model.peft_config[model.active_adapter], "r", 0))


def refuse_other_adapters(model: Any) -> None:
    """Raise UsageError for an adapter that `whole_model` cannot merge."""
    if not hasattr(model, "peft_config"):
        return
    config = model.peft_config[model.active_adapter]
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    if kind != "LORA" or getattr(config, "use_dora", False):
        kind = "DoRA" if kind == "LORA" else kind
        raise UsageError(f"the model is trained by {kind}, and an index needs whole weights", fix=_FIX)
    for name, module in model.named_modules():
        base = getattr(module, "base_layer", None)
        if base is not None and not base.weight.is_floating_point():
            raise UsageError(f"the weights of {name} are quantised, and an index needs whole ones", fix=_FIX)


@torch.no_grad()
def whole_model(model: Any) -> tuple[Any, dict[str, torch.Tensor] | None]:
    """Return the model to save, and its weights with low-rank parts added; None: its own weights."""
    if not hasattr(model, "peft_config"):
        return model, None
    base, adapter = model.get_base_model(), model.active_adapter
    merged = {}
    for name, value in base.state_dict().items():
        if ".lora_" in name or ".original_module." in name:
            continue
        merged[name.replace(".base_layer.", ".").replace(f".modules_to_save.{adapter}.", ".")] = value
    for name, module in base.named_modules():
        if hasattr(module, "get_delta_weight") and hasattr(module, "base_layer"):
            weight = module.base_layer.weight
            merged[f"{name}.weight"] = weight + module.get_delta_weight(adapter).to(weight.dtype)
    return base, merged
