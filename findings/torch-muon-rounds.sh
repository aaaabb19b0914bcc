#!/usr/bin/env bash
# torch.optim.Muon updates float32 and float64 parameters by numbers in bfloat16.
#
# Version: torch 2.13.0.
# Behaviour: the orthogonalisation runs in bfloat16 whatever the parameter's type is, and its result is added as it is.
# Every element of the update has 8 bits of precision. In double precision the update is the same as in single.
# Surprise: a run in float32 or float64 is expected to be as exact as its type. A checkpoint that is retrained to be
# compared, or a finite difference through a step, meets relative errors of a percent.
# Seen: "float64 as float32: True, all values in bfloat16: True, relative error 0.0144"
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6
cd "$work"
"$work/venv/bin/python" -W ignore - <<'PYTHON'
import torch

torch.manual_seed(0)
gradient = torch.randn(32, 32, dtype=torch.float64)


def update(dtype):
    weight = torch.nn.Parameter(torch.zeros(32, 32, dtype=dtype))
    weight.grad = gradient.to(dtype)
    torch.optim.Muon([weight], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False).step()
    return -weight.detach().double()


def exact(steps=5, coefficients=(3.4445, -4.7750, 2.0315)):
    a, b, c = coefficients
    x = gradient / gradient.norm()
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


single, double, wanted = update(torch.float32), update(torch.float64), exact()
error = ((double - wanted).norm() / wanted.norm()).item()
same, rounded = torch.equal(single, double), torch.equal(double, double.bfloat16().double())
print(f"float64 as float32: {same}, all values in bfloat16: {rounded}, relative error {error:.4f}")
assert same and rounded and error > 1e-3
PYTHON
