#!/usr/bin/env bash
# transformers refuses to save a model that it has read from a GGUF file, even of one that was never quantised.
#
# Versions: transformers 5.24.0, gguf 0.19.0, torch 2.13.0.
# Behaviour: `from_pretrained(gguf_file=...)` makes plain float32 weights of the file, and leaves a quantisation config behind.
# `save_pretrained` goes by that config: "The model is quantized with gguf and is not serializable".
# Surprise: reading a GGUF file is the documented way to train on or to convert it, every parameter is an ordinary float32
# tensor, and here the file itself holds nothing but float32. Only at the end of a fine-tuning, when it is saved, is it refused.
# Way round: a copy by the same class, of the config without `quantization_config` and the state dict; it saves and loads.
# Seen: "read: float32 alone", "saved: ValueError, quantized with gguf", "a copy: saved, and reads the same"
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0 gguf==0.19.0 accelerate
cd "$work"
HF_HUB_OFFLINE=1 "$work/venv/bin/python" -W ignore - <<'PYTHON'
import numpy as np
import torch
from gguf import GGUFWriter
from transformers import AutoModelForCausalLM

width, wide, words = 64, 128, 50
shapes = {"token_embd": (words, width), "output": (words, width), "output_norm": (width,)}
inside = {"attn_norm": (width,), "ffn_norm": (width,), "ffn_gate": (wide, width), "ffn_up": (wide, width)}
inside |= {f"attn_{name}": (width, width) for name in ("q", "k", "v", "output")} | {"ffn_down": (width, wide)}
shapes |= {f"blk.0.{name}": shape for name, shape in inside.items()}
writer = GGUFWriter("tiny.gguf", "llama")
for add, value in {
    "context_length": 32, "embedding_length": width, "block_count": 1, "feed_forward_length": wide, "head_count": 2,
    "head_count_kv": 2, "layer_norm_rms_eps": 1e-5, "vocab_size": words, "rope_freq_base": 10000.0,
}.items():
    getattr(writer, f"add_{add}")(value)
random = np.random.default_rng(0)
for name, shape in shapes.items():
    writer.add_tensor(f"{name}.weight", random.normal(size=shape).astype(np.float32))
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()

model = AutoModelForCausalLM.from_pretrained(".", gguf_file="tiny.gguf", dtype=torch.float32)
assert {each.dtype for each in model.parameters()} == {torch.float32}
print("read: float32 alone")
try:
    model.save_pretrained("refused")
    raise SystemExit("it is saved now")
except ValueError as error:
    assert "quantized with gguf" in str(error), error
    print("saved: ValueError, quantized with gguf")
del model.config.quantization_config
copy = type(model)(model.config)
copy.load_state_dict(model.state_dict())
copy.save_pretrained("copied")
again = AutoModelForCausalLM.from_pretrained("copied")
assert all(torch.equal(one, two) for one, two in zip(model.parameters(), again.parameters()))
print("a copy: saved, and reads the same")
PYTHON
