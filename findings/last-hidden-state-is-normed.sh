#!/usr/bin/env bash
# The last of transformers' hidden_states is another kind of vector than all before it.
#
# Versions: transformers 5.24.0, torch 2.13.0.
# Behaviour: with output_hidden_states=True, entry i is what goes into block i, and the last entry is what leaves the
# final norm. What the last block itself gives is nowhere in the list.
# Surprise: "layer -1" and "layer -2" differ by a norm as well as by a block. Similarities of representations, probes
# and steering vectors that sweep layers compare unlike things at the end; the residual stream there needs a hook.
# Seen: "norm of the last entry 41.5, of the last block's output 0.3"
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0
cd "$work"
"$work/venv/bin/python" -W ignore - <<'PYTHON'
import torch
from transformers import LlamaConfig, LlamaModel

torch.manual_seed(0)
sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, vocab_size=100)
model = LlamaModel(LlamaConfig(**sizes)).eval()
model.norm.weight.data.mul_(3.0)
given = []
model.layers[-1].register_forward_hook(
    lambda block, inputs, output: given.append(output[0] if isinstance(output, tuple) else output)
)
with torch.no_grad():
    found = model(torch.arange(6)[None], output_hidden_states=True)
last, block = found.hidden_states[-1], given[0]
print(f"norm of the last entry {last.norm():.1f}, of the last block's output {block.norm():.1f}")
assert len(found.hidden_states) == 4 and torch.equal(last, found.last_hidden_state)
assert not any(torch.allclose(each, block) for each in found.hidden_states)
PYTHON
