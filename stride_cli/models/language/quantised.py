"""Checkpoints whose weights stay in four or eight bits (their config.json has a quantization_config).

Only the passes through such a model are needed, and gradients with respect to what its layers read: the
weights themselves are neither differentiated nor changed. Not every library gives these gradients in every
mode, and one that does not may say nothing: they are compared with differences, which of a linear layer are
exact.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stride_cli.errors import MissingExtraError, ModelError, require_extra

# of the product of the lengths; bfloat16's rounding and that of activations to int8 are within
_TOLERANCE = 0.05
_ROWS = 4


def quantisation(directory: Path) -> str | None:
    """Quantisation that a checkpoint's config.json names: "bitsandbytes", "gptq"; None: plain."""
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None  # whoever loads it says what is wrong
    found = config.get("quantization_config") if isinstance(config, dict) else None
    return str(found.get("quant_method", "unknown")) if isinstance(found, dict) else None


def missing_package(error: ImportError, method: str) -> MissingExtraError | ModelError:
    """The error for a checkpoint whose library is not installed."""
    if method == "bitsandbytes":
        return require_extra("bitsandbytes", "bitsandbytes")
    line = " ".join(str(error).split())
    return ModelError(
        f"weights quantised by {method} need a library that is not installed: {line}",
        fix="install it, or give the model in plain weights",
    )


def refuse_training(directory: Path, given: str) -> None:
    """ModelError for a checkpoint in few bits: its weights cannot be trained."""
    method = quantisation(directory)
    if method is not None:
        raise ModelError(
            f"the weights of '{given}' are quantised ({method}), and cannot be trained",
            fix="give the model that they were made of, in plain weights",
        )


def make_differentiable(model: nn.Module) -> None:
    """Have every quantised layer give gradients with respect to what it reads, or refuse the model.

    Raises ModelError: a kind of layer whose gradients are wrong, or that has none.
    """
    seen: set[type] = set()
    for layer in model.modules():
        # bitsandbytes lays four-bit weights out anew in the first pass without gradients on a CPU, and what
        # multiplies them then is not differentiated
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            layer.support_avx512bf16_for_cpu = False  # type: ignore[assignment]
        kind = type(layer)
        widths = getattr(layer, "in_features", None), getattr(layer, "out_features", None)
        if kind in seen or kind is nn.Linear or not all(isinstance(each, int) for each in widths):
            continue
        seen.add(kind)
        if not _gradients_hold(layer, widths):
            raise ModelError(
                f"layers of the kind {kind.__name__} give no gradients with respect to what they read",
                fix="give the model in plain weights, or quantised by another library (bitsandbytes works)",
            )


def _gradients_hold(layer: nn.Module, widths: Any) -> bool:
    """Check ⟨u, f(x + v) − f(x)⟩ = ⟨∇⟨u, f⟩, v⟩, after a pass without gradients as in use."""
    weight = next(layer.parameters())
    dtype = weight.dtype if weight.is_floating_point() else torch.float32
    dtype = getattr(layer, "compute_dtype", None) or dtype
    random = torch.Generator().manual_seed(0)

    def drawn(width: int) -> torch.Tensor:
        return torch.randn(_ROWS, width, generator=random).to(weight.device, dtype)

    reads, gives = widths
    x, v, u = drawn(reads), drawn(reads), drawn(gives)
    try:
        with torch.no_grad():
            moved = (layer(x + v) - layer(x)).float()
        with torch.enable_grad():
            read = x.clone().requires_grad_()
            (gradient,) = torch.autograd.grad(layer(read), read, u)
    except (RuntimeError, NotImplementedError):
        return False
    wanted, found = (u.float() * moved).sum(), (gradient.float() * v.float()).sum()
    return bool((wanted - found).abs() <= _TOLERANCE * u.float().norm() * moved.norm())
