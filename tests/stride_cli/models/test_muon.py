"""Muon against torch's, and its directions against the polynomial in double precision."""

from __future__ import annotations

import pytest
import torch

from stride_cli.models import muon
from stride_cli.models.muon import COEFFICIENTS, Muon, orthogonalised

SHAPES = [(8, 24), (24, 8), (16, 16), (8, 24), (1, 5)]


def reference(matrix: torch.Tensor) -> torch.Tensor:
    """Five steps of the quintic on the singular values, in float64."""
    u, s, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    s = s / matrix.double().norm()
    a, b, c = COEFFICIENTS
    for _ in range(5):
        s = a * s + b * s**3 + c * s**5
    return u @ torch.diag(s) @ v


@pytest.mark.parametrize("shape", [(8, 9), (8, 24), (1, 5)])
@pytest.mark.parametrize("spread", [0.0, 6.0])
def test_directions(shape: tuple[int, int], spread: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """In single precision, also where singular values are six orders of magnitude apart."""
    monkeypatch.setattr(muon, "multiplies_bf16", lambda device: False)
    matrices = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0))
    matrices *= torch.logspace(0, -spread, shape[0])[:, None]
    for matrix, found in zip(matrices, orthogonalised(matrices), strict=True):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), reference(matrix), atol=2e-5, rtol=0)
    assert not orthogonalised(torch.zeros(1, 4, 4)).any()


@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_steps_are_those_of_torch(adjust: str, nesterov: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """To rounding where both multiply in bfloat16; closer to double precision where ours does not."""
    random = torch.Generator().manual_seed(1)
    start = [torch.randn(*shape, generator=random) for shape in SHAPES]
    gradients = [[torch.randn(*shape, generator=random) for shape in SHAPES] for _ in range(6)]
    options = {"lr": 0.05, "weight_decay": 0.1, "nesterov": nesterov, "adjust_lr_fn": adjust}

    def train(kind: type[torch.optim.Muon]) -> list[torch.Tensor]:
        parameters = [torch.nn.Parameter(value.clone()) for value in start]
        unused = torch.nn.Parameter(torch.ones(2, 2))
        optimizer = kind([*parameters, unused], **options)
        for number, step in enumerate(gradients):
            for parameter, gradient in zip(parameters, step, strict=True):
                parameter.grad = gradient.clone()
            optimizer.step()
            if number == 2:  # what has been saved goes on
                saved = optimizer.state_dict()
                optimizer = kind([*parameters, unused], **options)
                optimizer.load_state_dict(saved)
        assert torch.equal(unused, torch.ones(2, 2))
        return [parameter.detach() for parameter in parameters]

    monkeypatch.setattr(muon, "multiplies_bf16", lambda device: False)
    torchs, ours = train(torch.optim.Muon), train(Muon)
    monkeypatch.setattr(muon, "multiplies_bf16", lambda device: True)
    low = train(Muon)
    for one, two, three in zip(torchs, ours, low, strict=True):
        torch.testing.assert_close(one, three, atol=4e-3, rtol=0)
        torch.testing.assert_close(one, two, atol=2e-2, rtol=0)
