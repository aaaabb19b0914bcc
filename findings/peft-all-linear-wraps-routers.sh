#!/usr/bin/env bash
# `target_modules="all-linear"` puts LoRA on routers and fused experts of a mixture of experts, too.
#
# Versions: peft 0.21.2, transformers 5.24.0, torch 2.13.0.
# Behaviour: of Mixtral, whose experts are tensors of three axes and no linear layers, the adapter is on the router and
# on both expert tensors, beside the layers of attention.
# Surprise: "all linear layers" is read as torch.nn.Linear. Tools that list an adapter's layers by isinstance, or merge
# them layer by layer, see a part of what was trained.
# Way round: compare a merged model's logits with the adapted one's, or name target_modules.
# Seen: "attention 4, router 1, experts 2" (adapted parts of one layer)
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0 peft==0.21.2
cd "$work"
"$work/venv/bin/python" -W ignore - <<'PYTHON'
from peft import LoraConfig, get_peft_model
from transformers import MixtralConfig, MixtralForCausalLM

config = MixtralConfig(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_local_experts=4,
    vocab_size=100,
)
model = get_peft_model(MixtralForCausalLM(config), LoraConfig(r=2, target_modules="all-linear"))
adapted = [name for name, _ in model.named_parameters() if "lora_A" in name]
counts = {
    "attention": sum("self_attn" in name for name in adapted),
    "router": sum(".gate." in name for name in adapted),
    "experts": sum(".experts." in name for name in adapted),
}
print(", ".join(f"{part} {count}" for part, count in counts.items()))
assert counts["router"] and counts["experts"], adapted
PYTHON
