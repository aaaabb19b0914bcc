"""Compiled passes: rounding to bfloat16, exp and cross entropy against NumPy and torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from stride_cli.research.training import nanochat_kernels as kernels


def _low(values: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    tensor = torch.from_numpy(values).to(dtype)
    return (tensor.view(torch.uint16) if dtype == torch.bfloat16 else tensor).numpy().copy()


def _wide(low: np.ndarray) -> torch.Tensor:
    return (
        torch.from_numpy(low).view(torch.bfloat16).float()
        if low.dtype == np.uint16
        else torch.from_numpy(low)
    )


def test_rounds_as_torch_does():
    values = np.random.default_rng(0).normal(size=(50, 64)).astype(np.float32)
    values[0, :4] = [1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 0.0]  # ties go to even
    x = np.zeros_like(values)
    change = _low(values, torch.bfloat16)
    kernels.add_kernel(x, change)
    np.testing.assert_array_equal(x, torch.from_numpy(values).bfloat16().float().numpy())
    active, square = _low(values, torch.bfloat16), np.zeros_like(change)
    kernels.square_kernel(active, square)
    expected = torch.from_numpy(values).bfloat16().relu()
    assert torch.equal(_wide(active), expected.float())
    assert torch.equal(_wide(square), (expected * expected).float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loss_and_its_slope(dtype):
    random = np.random.default_rng(1)
    z = _low((random.normal(size=(40, 97)) * random.choice([0.1, 5, 60], (40, 1))).astype(np.float32), dtype)
    targets = random.integers(0, 97, 40)
    logits = _wide(z).double().requires_grad_()
    expected = torch.nn.functional.cross_entropy(
        torch.tanh(logits / 15) * 15, torch.from_numpy(targets), reduction="sum"
    )
    (expected * 0.25).backward()
    total = kernels.loss_kernel(z, targets, np.float32(15), np.float32(0.25))
    assert total == pytest.approx(float(expected.detach()), rel=1e-5)
    tolerance = 1e-6 if dtype == torch.float32 else 2e-3
    np.testing.assert_allclose(_wide(z).numpy(), logits.grad.numpy(), atol=tolerance)


def test_norm_and_its_slope():
    random = np.random.default_rng(2)
    values = random.normal(size=(30, 24)).astype(np.float32)
    x = torch.from_numpy(values).double().requires_grad_()
    expected = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    normed, inverse, low = np.empty_like(values), np.empty(30, np.float32), np.empty_like(values)
    kernels.norm_kernel(values, np.float32(1e-6), normed, low, inverse)
    np.testing.assert_allclose(normed, expected.detach().numpy(), atol=1e-6)
    np.testing.assert_array_equal(low, normed)
    upstream = random.normal(size=(30, 24)).astype(np.float32)
    (slope,) = torch.autograd.grad(expected, x, torch.from_numpy(upstream).double())
    dx = np.ones_like(values)
    kernels.norm_back_kernel(upstream, normed, inverse, dx, low)
    np.testing.assert_allclose(dx, 1 + slope.numpy(), atol=1e-5)
    np.testing.assert_array_equal(low, dx)
