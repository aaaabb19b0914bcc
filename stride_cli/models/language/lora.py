"""Low-rank adaptation (Hu et al. 2021, arXiv:2106.09685): W + (α/r)·B·A on the linear layers of the blocks.

A and B are parameters of the linear layer itself, added to its output by a hook; the model keeps its
structure, and merging is a sum of weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from stride_cli.errors import ModelError
from stride_cli.models.language.files import find_offline, weight_files
from stride_cli.models.language.language_recipe import Recipe
from stride_cli.models.language.structure import block_stack
from stride_cli.models.linear_layers import AdapterMatrices, is_linear, layer_widths

_SCALE = 2.0  # α = 2r, as is common


def add_lora(
    model: Any, *, rank: int, seed: int, layers: Iterable[nn.Module] | None = None, scale: float = _SCALE
) -> list[nn.Parameter]:
    """Freeze a model and give each linear layer of its blocks matrices A (rank, in) and B (out, rank).

    A is drawn from U(−1/√in, 1/√in) by `seed`, B is zero, so that the model starts as it was.

    `layers`: these instead of all of the blocks; `scale`: α/r. Returns the fp32 parameters that require
    gradients afterwards; ModelError where there is no linear layer.
    """
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    added: list[nn.Parameter] = []
    chosen: Iterable[Any] = block_stack(model).modules() if layers is None else layers
    for layer, n_out, start in _drawn(chosen, rank, seed):
        device = next(layer.parameters()).device
        layer.lora_a = nn.Parameter(start.to(device))
        layer.lora_b = nn.Parameter(torch.zeros((n_out, rank), device=device))
        layer.lora_scale = scale
        layer.register_forward_hook(_add_low_rank)
        added += [layer.lora_a, layer.lora_b]
    if not added:
        raise ModelError(
            f"{type(model).__name__} has no linear layers in its blocks", fix="fine-tune with --full"
        )
    return added


def _drawn(layers: Iterable[Any], rank: int, seed: int) -> Iterator[tuple[Any, int, Tensor]]:
    """(layer, out_features, A) for each linear layer, A (rank, in)."""
    generator = torch.Generator().manual_seed(seed)
    for layer in layers:
        if is_linear(layer):
            n_in, n_out = layer_widths(layer)
            bound = 1 / math.sqrt(n_in)
            yield layer, n_out, (torch.rand((rank, n_in), generator=generator) * 2 - 1) * bound


@torch.no_grad()
def merged_weights(model: Any) -> dict[str, Tensor] | None:
    """The state dict of the model with its low-rank parts added in; None for a model without any."""
    adapted = {name: layer for name, layer in model.named_modules() if hasattr(layer, "lora_a")}
    if not adapted:
        return None
    weights = {
        name: value for name, value in model.state_dict().items() if not name.endswith((".lora_a", ".lora_b"))
    }
    for name, layer in adapted.items():
        change = layer.lora_scale * (layer.lora_b @ layer.lora_a)  # (out, in)
        if not isinstance(layer, nn.Linear):
            change = change.T
        weights[f"{name}.weight"] = layer.weight + change.to(layer.weight.dtype)
    return weights


def _add_low_rank(layer: Any, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
    low = nn.functional.linear(nn.functional.linear(args[0], layer.lora_a), layer.lora_b)
    return output + layer.lora_scale * low


# of the square of W − W₀ in its r leading directions: the rest is of rounding, or another base
_ENOUGH = 0.99


def trained_matrices(model: Any, recipe: Recipe) -> dict[nn.Module, AdapterMatrices]:
    """Find bases of A's rows and of B's columns for every linear layer of the blocks that was trained so.

    W − W₀ = (α/r) B A, whose row and column spaces are those of A and B as training left them. Where that
    cannot be told (the base model is not on this machine or not in safetensors, or weights are of 16 bits,
    whose rounding is larger): A as its seed drew it, of which .9 was left after 56 steps, and no B.
    """
    # A (rank, in) as `add_lora` began with it, in layers that were merged since
    names, only = {layer: name for name, layer in model.named_modules()}, recipe.lora_layers
    every = _drawn(block_stack(model).modules(), recipe.lora_rank, recipe.seed)
    drawn = {layer: start for layer, _, start in every if only is None or names[layer] in only}
    with ExitStack() as opened:
        before = _weights(str(recipe.base), opened)
        return {layer: _added(layer, before(f"{names[layer]}.weight"), A) for layer, A in drawn.items()}


def _weights(base: str, opened: ExitStack) -> Callable[[str], Tensor | None]:
    """Weights of a model by name, as they are in its files; None where there are none."""
    from safetensors import SafetensorError, safe_open

    found: dict[str, Any] = {}
    try:
        files = [] if find_offline(base) is None else weight_files(base)
        for path in files:
            if path.suffix == ".safetensors":
                file = opened.enter_context(safe_open(path, framework="pt"))
                found.update(dict.fromkeys(file.keys(), file))
    except (ModelError, SafetensorError, OSError):
        found.clear()
    return lambda name: found[name].get_tensor(name) if name in found else None


def _added(layer: Any, before: Tensor | None, drawn: Tensor) -> AdapterMatrices:
    """Factor a layer's change; A as `drawn` where it cannot be told."""
    after, unknown = layer.weight, AdapterMatrices(drawn, None)
    if before is None or after.is_meta or before.shape != after.shape or not after.is_floating_point():
        return unknown
    change = after.detach().float().cpu() - before.float()
    change = change if isinstance(layer, nn.Linear) else change.T  # GPT-2's, (in, out)
    with torch.random.fork_rng(devices=[]):  # all of its directions would take minutes of a large model
        torch.manual_seed(0)
        columns, sizes, rows = torch.svd_lowrank(change, q=len(drawn))
    if not float(sizes.square().sum()) >= _ENOUGH * float(change.square().sum()) > 0:
        return unknown
    return AdapterMatrices(rows.T.contiguous(), columns.contiguous())
