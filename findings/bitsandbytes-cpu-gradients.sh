#!/usr/bin/env bash
# A four-bit layer of bitsandbytes gives no gradient after one inference pass, on CPUs with bfloat16.
#
# Versions: bitsandbytes 0.49.0, torch 2.13.0, a CPU with avx512_bf16 (others: exits with 0 and says so).
# Behaviour: in eval mode, the first forward pass under no_grad repacks the weights for a fused kernel. From then on
# the layer's output does not depend on its input as far as autograd can see. backward() raises nothing, and the
# input's gradient is None.
# Surprise: a model in eval mode whose loss is measured once, and differentiated afterwards, loses every gradient that
# goes through such a layer. Before the first pass the gradient is right.
# Way round: set layer.support_avx512bf16_for_cpu = False before the first pass.
# Seen: "before: 20.0, after: None, with the switch off: 20.0" (norms of the gradient)
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 bitsandbytes==0.49.0
cd "$work"
"$work/venv/bin/python" -W ignore - <<'PYTHON'
import sys

import bitsandbytes as bnb
import torch


def layer():
    torch.manual_seed(0)
    plain = torch.nn.Linear(128, 64, bias=False).to(torch.bfloat16)
    made = bnb.nn.Linear4bit(128, 64, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4")
    made.load_state_dict(plain.state_dict())
    return made.to("cpu").eval()


def gradient(made):
    torch.manual_seed(1)
    read = torch.randn(8, 128, dtype=torch.bfloat16, requires_grad=True)
    made(read).float().square().sum().backward()
    return None if read.grad is None else round(read.grad.float().norm().item(), 1)


made = layer()
if not made.support_avx512bf16_for_cpu:
    print("this CPU has no avx512_bf16: nothing to see")
    sys.exit(0)
before = gradient(made)
with torch.no_grad():
    made(torch.randn(8, 128, dtype=torch.bfloat16))
try:
    after = gradient(made)
except RuntimeError as error:
    after = str(error)
switched = layer()
switched.support_avx512bf16_for_cpu = False
with torch.no_grad():
    switched(torch.randn(8, 128, dtype=torch.bfloat16))
print(f"before: {before}, after: {after}, with the switch off: {gradient(switched)}")
assert before and not isinstance(after, float) and gradient(switched) == before
PYTHON
