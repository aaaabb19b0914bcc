#!/usr/bin/env bash
# The longest sequence of a batch changes the others, where positions are scaled by length (LongRoPE, dynamic NTK).
#
# Versions: transformers 5.24.0, torch 2.13.0.
# Behaviour: the rotary frequencies are chosen once for a forward pass, from the largest position in the padded batch.
# A short sequence beside a long one gets the frequencies of the long one.
# Surprise: an attention mask is expected to make padding harmless, and for plain rotary positions it does (1e-6).
# Losses and gradients of such models depend on who shares the batch.
# Way round: batches that do not cross the model's original length, or one sequence at a time.
# Seen: "default 4e-08, dynamic 1e-04, longrope 1e-03" (largest difference of a logit, random weights)
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0
cd "$work"
"$work/venv/bin/python" -W ignore - <<'PYTHON'
import torch
from transformers import LlamaConfig, LlamaForCausalLM

KINDS = {
    "default": {},
    "dynamic": {"factor": 2.0},
    "longrope": {
        "long_factor": [4.0] * 4,
        "short_factor": [1.0] * 4,
        "original_max_position_embeddings": 32,
        "factor": 4.0,
    },
}
apart = {}
for kind, settings in KINDS.items():
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=100,
        max_position_embeddings=128 if kind == "longrope" else 32,
        rope_parameters={"rope_type": kind, "rope_theta": 10_000.0, **settings},
    )
    model = LlamaForCausalLM(config).eval()
    short, long = torch.randint(0, 100, (1, 20)), torch.randint(0, 100, (1, 60))
    batch = torch.cat([torch.nn.functional.pad(short, (0, 40)), long])
    mask = torch.ones_like(batch)
    mask[0, 20:] = 0
    with torch.no_grad():
        alone = model(short).logits[0]
        beside = model(batch, attention_mask=mask).logits[0, :20]
    apart[kind] = (alone - beside).abs().max().item()
print(", ".join(f"{kind} {value:.0e}" for kind, value in apart.items()))
assert apart["default"] < 1e-6 < 1e-5 < min(apart["dynamic"], apart["longrope"])
PYTHON
