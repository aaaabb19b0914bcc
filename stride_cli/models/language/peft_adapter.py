"""LoRA adapters that PEFT saved: put on their base model, then added to its weights.

What is attributed is W + (α/r)·B·A, the model that answers; what training moved of it are the layers that the
adapter is on, and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from stride_cli.errors import ModelError, first_line, require_extra
from stride_cli.models.language.files import Source, weight_files
from stride_cli.models.language.quantised import is_quantised
from stride_cli.models.linear_layers import AdapterMatrices


def with_adapter(base: Any, source: Source) -> Any:
    """The base model with an adapter added to its weights, a plain model of transformers.

    Its attribute ``adapted_layers`` holds the names of the layers that the adapter is on, and the
    `AdapterMatrices` of each, None where it is no linear layer.

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
    adapted = {
        name.removeprefix("base_model.model."): _matrices(module)
        for name, module in model.named_modules()
        if hasattr(module, "base_layer") and hasattr(module, "get_delta_weight")
    }
    with torch.no_grad():
        merged = _beside_quantised(model, adapted, source) if is_quantised(base) else model.merge_and_unload()
    merged.adapted_layers = adapted
    return merged


def _matrices(layer: Any) -> AdapterMatrices | None:
    """Matrices of an adapted linear layer; None of any other."""
    names = [each for each in layer.active_adapters if each in layer.lora_A]
    A, B = (
        [part[each].weight.detach().float().cpu() for each in names] for part in (layer.lora_A, layer.lora_B)
    )
    if not names or any(part.ndim != 2 for part in (*A, *B)):
        return None
    given = torch.cat(B, dim=1)
    return AdapterMatrices(torch.cat(A), given if given.any() else None)


def _beside_quantised(model: Any, adapted: Iterable[str], source: Source) -> Any:
    """The base with plain weights in the layers that an adapter is on, and its change added to them: in few
    bits most of it would be rounded away. Their type is that in which they are multiplied."""
    from peft.utils.integrations import dequantize_module_weight
    from torch import nn

    sums: dict[str, nn.Linear] = {}
    for name in sorted(adapted):
        layer = model.get_submodule(f"base_model.model.{name}")
        below = layer.base_layer
        if not isinstance(below, nn.Linear) or any(getattr(layer, "use_dora", {}).values()):
            raise ModelError(
                f"adapter '{source.given}' cannot be added to quantised layers such as {name}",
                fix="merge it into its base model in plain weights, and give that",
            )
        whole = dequantize_module_weight(below)
        kind = getattr(below, "compute_dtype", None) or whole.dtype
        plain = nn.Linear(below.in_features, below.out_features, bias=below.bias is not None, device="meta")
        change = sum(layer.get_delta_weight(each) for each in layer.active_adapters)
        plain.weight = nn.Parameter((whole.float() + change.float()).to(kind), requires_grad=False)
        if below.bias is not None:
            plain.bias = nn.Parameter(below.bias.to(kind), requires_grad=False)
        sums[name] = plain
    merged = model.unload()
    for name, plain in sums.items():
        merged.set_submodule(name, plain)
    return merged


def _reason(error: Exception) -> str:
    """The line of an error that says most: torch lists sizes that differ after a heading."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next((line for line in lines if line.startswith("size mismatch")), first_line(error))
