"""LoRA adapters that PEFT saved: put on their base model, then added to its weights in float32.

What is attributed is W + (α/r)·B·A, the model that answers; what training moved of it are the layers that the
adapter is on, and nothing else.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stride_cli.errors import ModelError, first_line, require_extra
from stride_cli.models.language.files import Source, weight_files
from stride_cli.models.language.structure import is_quantised
from stride_cli.models.linear_layers import AdapterMatrices, is_linear

_PREFIX = "base_model.model."
_PROBE = 12  # tokens


def with_adapter(base: Any, source: Source) -> Any:
    """The base model, which is changed, with an adapter added to its weights: a plain model of transformers.

    A matrix that an adapted layer shares with another (a tied head) becomes its own. What layers give, and
    the logits, of a few tokens are compared with PEFT's own model. Attributes of the model:
    ``adapted_layers``, the names of the layers that the adapter is on and the `AdapterMatrices` of each, None
    where it is no linear layer; ``added_biases``, the names of those that have a bias by the adapter alone.

    Raises ModelError: weights that cannot be read, are not of this base (layers that it does not have, of
    another shape, too few or too many), or cannot be added. Raises MissingExtraError: without the package
    peft.
    """
    try:
        from peft import PeftModel, get_peft_model_state_dict
        from peft.utils import load_peft_weights
    except ImportError:
        raise require_extra("peft", "peft") from None
    weight_files(source.given)  # refused where it has none: peft would ask the hub
    adapter = source.directory
    assert source.base is not None
    unfit = f"adapter '{source.given}' does not fit its base model '{source.base.given}'"
    other = f"give the model that it was trained on: --model BASE --adapter {source.given}"
    # 1. On the base, as PEFT puts it
    try:
        stored = load_peft_weights(str(adapter), device="cpu")
    except Exception as error:  # safetensors and torch have many
        raise ModelError(
            f"the weights of adapter '{source.given}' cannot be read: {first_line(error)}",
            fix="copy adapter_config.json and adapter_model.safetensors again",
        ) from error
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            model = PeftModel.from_pretrained(base, str(adapter), local_files_only=True).eval()
    except Exception as error:
        raise ModelError(f"{unfit}: {_reason(error)}", fix=other) from error
    there = get_peft_model_state_dict(model, save_embedding_layers=False)
    surplus = {key for key in stored.keys() - there.keys() if ".lora_" in key}
    for what, keys in (("lacks", there.keys() - stored.keys()), ("has, beside", surplus)):
        if keys:
            raise ModelError(
                f"{unfit}: it {what} {len(keys)} parts of that model's layers, {min(keys)}"
                + (" …" if len(keys) > 1 else ""),
                fix=other,
            )
    wrapped = {
        name: module
        for name, module in model.named_modules()
        if hasattr(module, "base_layer") and hasattr(module, "get_delta_weight")
    }
    # several parameters of one module (fused experts) are wrapped one in the other
    names = {name.removeprefix(_PREFIX).replace(".base_layer", ""): layer for name, layer in wrapped.items()}
    adapted = {name: _matrices(layer) for name, layer in names.items()}
    with torch.no_grad():
        # 2. Added, and compared: each layer by what it reads there, in float32 all of them by the logits
        before, calls = _probe(model, {name: wrapped[_PREFIX + name] for name in adapted})
        quantised = is_quantised(base)
        merged, gained = _beside_quantised(model, names, source) if quantised else _merged(model, names)
        exact = base.dtype == torch.float32 and not quantised
        apart = [
            name
            for name, (args, kwargs, output) in calls.items()
            if _distance(output, merged.get_submodule(name)(*args, **kwargs)) > (1e-3 if exact else 5e-2)
        ]
        if apart or (exact and _distance(before, _probe(merged, {})[0]) > 1e-3):
            own = [each for each in told if "peft" in each.filename and each.category is not FutureWarning]
            said = "".join(f"; PEFT says: {str(each.message).splitlines()[0]}" for each in own)
            raise ModelError(
                f"adapter '{source.given}' cannot be added to the weights of its base model: "
                + (f"{apart[0]} gives" if apart else "its head gives")
                + f" something else afterwards{said}",
                fix="merge it into its base model yourself, and give that; please report the adapter's kind",
            )
    merged.adapted_layers, merged.added_biases = adapted, gained
    return merged


def _probe(model: Any, layers: Mapping[str, nn.Module]) -> tuple[Tensor, dict[str, tuple[Any, Any, Tensor]]]:
    """Run a few tokens: the logits, and what layers were called with and gave, in the order of their runs."""
    calls: dict[str, tuple[Any, Any, Tensor]] = {}

    def keep(name: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if isinstance(output, Tensor):
                calls[name] = args, kwargs, output

        return hook

    handles = [layer.register_forward_hook(keep(name), with_kwargs=True) for name, layer in layers.items()]
    try:
        tokens = model.get_input_embeddings()
        ids = torch.arange(_PROBE, device=tokens.weight.device)[None] * 7 % tokens.weight.shape[0]
        return model(input_ids=ids, use_cache=False).logits, calls
    finally:
        for handle in handles:
            handle.remove()


def _distance(wanted: Tensor, found: Tensor) -> float:
    """Largest difference, by the largest value; infinite where it is no number."""
    apart = (wanted.float() - found.float()).abs().max() / wanted.float().abs().max().clamp_min(1e-6)
    return float(apart.nan_to_num(math.inf))


def _matrices(layer: Any) -> AdapterMatrices | None:
    """Matrices of an adapted linear layer; None of any other, such as a router or fused experts."""
    names = [each for each in layer.active_adapters if each in layer.lora_A]
    A, B = (
        [part[each].weight.detach().float().cpu() for each in names] for part in (layer.lora_A, layer.lora_B)
    )
    if not names or not is_linear(layer.get_base_layer()) or any(part.ndim != 2 for part in (*A, *B)):
        return None
    given = torch.cat(B, dim=1)
    return AdapterMatrices(torch.cat(A), given if given.any() else None)


def _merged(model: Any, layers: Mapping[str, Any]) -> tuple[Any, set[str]]:
    """Merge by PEFT, in float32 into matrices of the layers' own, and name those that gain a bias."""
    kinds, gained = {}, set()
    for name, layer in layers.items():
        below = layer.get_base_layer()
        if not isinstance(below, nn.Linear | nn.Embedding) and not is_linear(below):
            continue
        kinds[name] = below.weight.dtype
        below.weight = nn.Parameter(below.weight.detach().float().clone(), requires_grad=False)
        if any(layer.lora_bias.get(each) for each in layer.active_adapters) and below.bias is None:
            gained.add(name)
            below.bias = nn.Parameter(below.weight.new_zeros(below.out_features), requires_grad=False)
        if getattr(below, "bias", None) is not None:
            below.bias = nn.Parameter(below.bias.detach().float(), requires_grad=False)
    merged = model.merge_and_unload()
    for name, kind in kinds.items():
        _settle(merged.get_submodule(name), kind, merged)
    if merged.get_output_embeddings().weight is not merged.get_input_embeddings().weight:
        merged.config.get_text_config().tie_word_embeddings = merged.config.tie_word_embeddings = False
    return merged, gained


def _settle(layer: Any, kind: torch.dtype, model: Any) -> None:
    """Give a layer in float32 its type again. What 16 bits round off, often most of an adapter's change, is
    added to what the layer gives (but for the head, whose matrix is multiplied in many places)."""
    whole = layer.weight.detach()
    layer.weight = nn.Parameter(whole.to(kind), requires_grad=False)
    if getattr(layer, "bias", None) is not None:
        layer.bias = nn.Parameter(layer.bias.detach().to(kind), requires_grad=False)
    rest = whole - layer.weight.float()
    if kind != torch.float32 and is_linear(layer) and layer is not model.get_output_embeddings():
        layer.rest = nn.Parameter(rest.to(kind), requires_grad=False)
        layer.register_forward_hook(_add_rest)


def _add_rest(layer: Any, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
    rest: Tensor = layer.rest
    return output + F.linear(args[0], rest if isinstance(layer, nn.Linear) else rest.T)


def _beside_quantised(model: Any, layers: Mapping[str, Any], source: Source) -> tuple[Any, set[str]]:
    """The base with plain weights in the layers that an adapter is on, and its change added to them: in few
    bits most of it would be rounded away. Their type is that in which they are multiplied."""
    from peft.utils.integrations import dequantize_module_weight

    sums: dict[str, tuple[nn.Linear, torch.dtype]] = {}
    for name, layer in sorted(layers.items()):
        below = layer.base_layer
        others = getattr(layer, "use_dora", {}) | getattr(layer, "lora_bias", {})
        if not isinstance(below, nn.Linear) or any(others.values()):
            raise ModelError(
                f"adapter '{source.given}' cannot be added to quantised layers such as {name}",
                fix="merge it into its base model in plain weights, and give that",
            )
        whole = dequantize_module_weight(below)
        plain = nn.Linear(below.in_features, below.out_features, bias=below.bias is not None, device="meta")
        change = sum(layer.get_delta_weight(each) for each in layer.active_adapters)
        plain.weight = nn.Parameter(whole.float() + change.float(), requires_grad=False)
        if below.bias is not None:
            plain.bias = nn.Parameter(below.bias.float(), requires_grad=False)
        sums[name] = plain, getattr(below, "compute_dtype", None) or whole.dtype
    merged = model.unload()
    for name, (plain, kind) in sums.items():
        merged.set_submodule(name, plain)
        _settle(plain, kind, merged)
    return merged, set()


def _reason(error: Exception) -> str:
    """The line of an error that says most: torch lists sizes that differ after a heading."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next((line for line in lines if line.startswith("size mismatch")), first_line(error))
