"""Backward passes that begin with a given gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _Seeded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return output.new_zeros(())

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return gradient, None


def seeded(output: Tensor, gradient: Tensor) -> Tensor:
    """A number whose gradient in `output` is `gradient`, of the same shape; zero, to be differentiated.

    What `torch.autograd.grad` does with ``grad_outputs``, which has it import sympy, a third of a second.
    """
    with torch.enable_grad():
        number: Tensor = _Seeded.apply(output, gradient)
    return number
