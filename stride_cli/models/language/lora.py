"""Low-rank adaptation (Hu et al. 2021, arXiv:2106.09685): W + (α/r)·B·A on the linear layers of the blocks.

A and B are parameters of the linear layer itself, added to its output by a hook; the model keeps its
structure, and merging is a sum of weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from stride_cli.errors import ModelError
from stride_cli.models.language.structure import block_stack

# α = 2r, as is common
_SCALE = 2.0


def add_lora(
    model: Any, *, rank: int, seed: int, layers: Iterable[nn.Module] | None = None, scale: float = _SCALE
) -> list[nn.Parameter]:
    """Freeze a model and give each linear layer of its blocks matrices A (rank, in) and B (out, rank).

    A is drawn from U(−1/√in, 1/√in) by `seed`, B is zero, so that the model starts as it was.

    Parameters
    ----------
    layers : modules, optional      these instead of all of the blocks
    scale : float                   α/r

    Returns
    -------
    list of Parameter, fp32: all that requires gradients afterwards.

    Raises
    ------
    ModelError
        No linear layer in the blocks.
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


def first_inputs(model: Any, *, rank: int, seed: int) -> dict[nn.Module, Tensor]:
    """The matrices A (rank, in) that `add_lora` began with in the layers of a model that was merged since."""
    return {layer: start for layer, _, start in _drawn(block_stack(model).modules(), rank, seed)}


def _drawn(layers: Iterable[Any], rank: int, seed: int) -> Iterator[tuple[Any, int, Tensor]]:
    """(layer, out_features, A) for each linear layer, A (rank, in)."""
    generator = torch.Generator().manual_seed(seed)
    for layer in layers:
        sizes = _sizes(layer)
        if sizes is not None:
            n_in, n_out = sizes
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


def _sizes(layer: nn.Module) -> tuple[int, int] | None:
    """(in, out) of a linear layer; None for any other."""
    if isinstance(layer, nn.Linear):
        return layer.in_features, layer.out_features
    if type(layer).__name__ == "Conv1D":  # GPT-2's linear layers, whose weights are (in, out)
        n_in, n_out = layer.weight.shape  # type: ignore[misc]
        return int(n_in), int(n_out)
    return None
