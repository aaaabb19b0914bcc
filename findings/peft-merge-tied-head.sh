#!/usr/bin/env bash
# Merging a LoRA adapter of a tied output head gives another model than the adapter did.
#
# Versions: peft 0.21.2, transformers 5.24.0, torch 2.13.0.
# Behaviour: where lm_head shares its matrix with the embedding, PEFT adds the adapter's change to the head alone while
# it runs. merge_and_unload() adds it to the shared matrix, so the embedding changes too.
# Surprise: merging is meant to change no output. A warning is printed when the adapter is made; the merge itself
# succeeds, and every later loss is that of a model that nobody trained.
# Way round: untie the two matrices (clone the head's weight) before the merge, and compare logits on a probe.
# Seen: "adapted 7.06, merged 19.08, untied and merged 7.06"
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0 peft==0.21.2
cd "$work"
"$work/venv/bin/python" -W ignore - <<'PYTHON'
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

ids = torch.arange(8)[None]


def adapted(untie):
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=100)
    base = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=True))
    if untie:
        base.lm_head.weight = torch.nn.Parameter(base.lm_head.weight.detach().clone())
        base.config.tie_word_embeddings = False
    torch.manual_seed(1)
    config = LoraConfig(r=4, lora_alpha=32, target_modules=["lm_head"], init_lora_weights=False)
    return get_peft_model(base, config).eval()


def loss(model):
    with torch.no_grad():
        return model(ids, labels=ids).loss.item()


tied, untied = adapted(False), adapted(True)
told = loss(tied), loss(tied.merge_and_unload()), loss(untied.merge_and_unload())
print("adapted {:.2f}, merged {:.2f}, untied and merged {:.2f}".format(*told))
assert abs(told[0] - told[1]) > 1 and abs(told[0] - told[2]) < 1e-3
PYTHON
