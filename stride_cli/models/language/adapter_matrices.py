"""Recover the low-rank change of layers of which only the sum is stored."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from stride_cli.errors import ModelError
from stride_cli.models.language.files import find_offline, weight_files
from stride_cli.models.language.language_recipe import Recipe
from stride_cli.models.language.lora import first_inputs
from stride_cli.models.linear_layers import AdapterMatrices

_ENOUGH = (
    0.99  # of the square of W − W₀ in its r leading directions: the rest is of rounding, or another base
)


def trained_matrices(model: Any, recipe: Recipe) -> dict[nn.Module, AdapterMatrices]:
    """Find bases of A's rows and of B's columns for every linear layer of the blocks.

    W − W₀ = (α/r) B A, whose row and column spaces are those of A and B as training left them. Where that
    cannot be told (the base model is not on this machine or not in safetensors, or weights are of 16 bits,
    whose rounding is larger): A as its seed drew it, of which .9 was left after 56 steps (`instructions`,
    ranks 8 and 16), and no B.
    """
    drawn = first_inputs(model, rank=recipe.lora_rank, seed=recipe.seed)
    names = {layer: name for name, layer in model.named_modules()}
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
    if not isinstance(layer, nn.Linear):  # GPT-2's, (in, out)
        change = change.T
    with torch.random.fork_rng(devices=[]):  # all of its directions would take minutes of a large model
        torch.manual_seed(0)
        columns, sizes, rows = torch.svd_lowrank(change, q=len(drawn))
    if not float(sizes.square().sum()) >= _ENOUGH * float(change.square().sum()) > 0:
        return unknown
    return AdapterMatrices(rows.T.contiguous(), columns.contiguous())
