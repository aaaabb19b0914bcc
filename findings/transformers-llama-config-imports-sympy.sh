#!/usr/bin/env bash
# Reading a Llama's config.json imports hundreds of modules, sympy and torch.distributed.tensor among them; a Qwen2's a few.
#
# Versions: transformers 5.24.0, torch 2.13.0, numpy 2.4.6.
# Behaviour: `AutoConfig.from_pretrained` imports the family's configuration module. That of Llama takes one validator
# from `transformers.utils.type_validators`, which, where torch is installed, imports the table of activation functions,
# and this the code around kernels and sharding. The modules of GPT-2, Qwen2 and GPT-NeoX do not.
# Surprise: a configuration is a JSON file of some hundred bytes, and families that compute alike load alike elsewhere.
# Programs that read it to learn a model's size (layers, width, context) before they decide what to load wait for half a
# second and hold some 60 MB more, for Llamas only; accelerate, where it is installed, is imported as well.
# Way round: where a few numbers are wanted, read them from config.json.
# Seen: "modules that reading a config imports: gpt2 4, sympy False; qwen2 4, sympy False; llama 655, sympy True"
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet transformers==5.24.0 torch==2.13.0 numpy==2.4.6
cat > "$work/look.py" <<'PYTHON'
import json
import sys
from pathlib import Path

import torch  # noqa: F401
from transformers import AutoConfig

place = Path(sys.argv[1])
place.mkdir()
(place / "config.json").write_text(json.dumps({"model_type": place.name}))
before = set(sys.modules)
AutoConfig.from_pretrained(place)
print(f"{len(set(sys.modules) - before)}, sympy {'sympy' in sys.modules}")
PYTHON
declare -A seen
for family in gpt2 qwen2 llama; do
    seen[$family]=$("$work/venv/bin/python" -W ignore "$work/look.py" "$work/$family" 2> "$work/log")
done
echo "modules that reading a config imports: gpt2 ${seen[gpt2]}; qwen2 ${seen[qwen2]}; llama ${seen[llama]}"
small='^[0-9]{1,2}, sympy False$' large='^[0-9]{3,}, sympy True$'
[[ ${seen[gpt2]} =~ $small && ${seen[qwen2]} =~ $small && ${seen[llama]} =~ $large ]]
