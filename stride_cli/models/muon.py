"""Muon, with its matrix products in a precision that the processor multiplies fast."""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# torch.optim.Muon's coefficients, floor and steps
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_EPS = 1e-7
_STEPS = 5


def orthogonalised(
    matrices: Tensor, coefficients: Sequence[float] = COEFFICIENTS, *, steps: int = _STEPS, eps: float = _EPS
) -> Tensor:
    """Newton–Schulz of matrices (S, a, b), a ≤ b: roughly U V^T of the singular value decomposition U S V^T.

    torch.optim.Muon multiplies in bfloat16 everywhere. Processors without instructions for it are ten times
    slower at that than in single precision, and most of a small model's training went into it. The result is
    bfloat16 where `multiplies_bf16`, else float32.
    """
    a, b, c = coefficients
    x = matrices.to(torch.bfloat16 if multiplies_bf16(matrices.device) else torch.float32)
    x = x / x.flatten(1).norm(dim=1).clamp(min=eps)[:, None, None]
    if x.dtype == torch.float32 and x.shape[2] >= 2 * x.shape[1]:
        return torch.bmm(_polynomial(torch.bmm(x, x.transpose(1, 2)), coefficients, steps), x)
    for _ in range(steps):
        gram = torch.bmm(x, x.transpose(1, 2))
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def _polynomial(gram: Tensor, coefficients: Sequence[float], steps: int) -> Tensor:
    """P with P x what `steps` steps make of x, from gram = x xᵀ (S, a, a) float32, which is smaller than x.

    A step is x ← Q x with Q = a + b G + c G², G = x xᵀ; so G ← Q G Q, and P is the product of all Q. Twice as
    fast for matrices four times as wide as high. In bfloat16 the squares of small singular values would go.
    """
    a, b, c = coefficients
    product: Tensor | None = None
    for left in reversed(range(steps)):
        step = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        step.diagonal(dim1=1, dim2=2).add_(a)
        product = step if product is None else torch.bmm(step, product)
        if left:
            gram = torch.bmm(torch.bmm(step, gram), step)
    assert product is not None
    return product


def multiplies_bf16(device: torch.device) -> bool:
    """True where bfloat16 products are faster than float32's:  GPUs that have them, CPUs with AMX tiles,
    and AMD's with AVX-512's dot products of bfloat16."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported()
    if device.type != "cpu":
        return False
    # times the training steps of fp32: on a Sapphire Rapids core, whose tiles are used, 1.5 (width 128) to
    # 1.8 (width 256); on a Zen 5 core, without tiles, 2.1 (width 128; the products alone 4.5). On the former
    # in a virtual machine that hides its tiles the products alone .5 (widths 128 to 576)
    kinds = ("amx_tile", "avx512_bf16")
    tiles, dots = (getattr(torch.cpu, f"_is_{each}_supported", bool)() for each in kinds)
    return bool(tiles or (dots and _amd()))


@cache
def _amd() -> bool:
    """True on AMD's processors."""
    try:
        return "AuthenticAMD" in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "AuthenticAMD" in platform.processor()  # as Windows calls them


class Muon(torch.optim.Muon):
    """torch.optim.Muon, matrices of one shape together, their directions by `orthogonalised`.

    Options, state and what a step does to a matrix are those of torch's, but for the precision.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; returns what `closure` does."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            alike: dict[tuple[int, ...], list[Tensor]] = {}
            for p in group["params"]:
                if p.grad is not None:
                    alike.setdefault((*sorted(p.shape), p.device.index or 0), []).append(p)
            for some in alike.values():
                directions = (self._direction(p, group) for p in some)
                found = orthogonalised(
                    torch.stack([each.T if each.shape[0] > each.shape[1] else each for each in directions]),
                    group["ns_coefficients"],
                    steps=group["ns_steps"],
                    eps=group["eps"],
                )
                for p, direction in zip(some, found, strict=True):
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    rate = group["lr"] * _ratio(p.shape, group["adjust_lr_fn"])
                    p.add_(direction if p.shape == direction.shape else direction.T, alpha=-rate)
        return loss

    def _direction(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        assert p.grad is not None
        state = self.state[p]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(p.grad)
        buffer: Tensor = state["momentum_buffer"]
        buffer.lerp_(p.grad, 1 - group["momentum"])
        return p.grad.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer


def _ratio(shape: Sequence[int], adjust: str | None) -> float:
    rows, columns = shape
    if adjust == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1.0, rows / columns))
