#!/usr/bin/env bash
# A model with dynamic NTK answers a sequence otherwise once it has seen a longer one.
#
# Versions: transformers 5.24.0, torch 2.13.0.
# Behaviour: past the original length the rotary frequencies follow the longest sequence so far. They stay for a shorter
# sequence that is still beyond the original length, and are reset only by one that is not.
# Surprise: a forward pass without a cache, in eval mode, is expected to be a function of its input. One sequence at a
# time is no cure either: losses depend on the order in which a corpus is read.
# Way round: keep to the original length, or ask a sequence of at most that length in between.
# Seen: "fresh 0e+00, after a longer one 2e-04, after a short one 0e+00" (largest difference of a logit)
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0
cd "$work"
"$work/venv/bin/python" -W ignore - <<'PYTHON'
import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
config = LlamaConfig(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    vocab_size=100,
    max_position_embeddings=32,
    rope_parameters={"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0},
)
model = LlamaForCausalLM(config).eval()
short, asked, longer = (torch.randint(0, 100, (1, length)) for length in (20, 40, 60))
with torch.no_grad():
    first = model(asked).logits
    again = model(asked).logits
    model(longer)
    later = model(asked).logits
    model(short)
    reset = model(asked).logits
apart = [(each - first).abs().max().item() for each in (again, later, reset)]
print("fresh {:.0e}, after a longer one {:.0e}, after a short one {:.0e}".format(*apart))
assert apart[0] < 1e-6 < 1e-5 < apart[1] and apart[2] < 1e-6
PYTHON
