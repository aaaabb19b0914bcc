#!/usr/bin/env bash
# bergson's `Attributor.search` with `unit_norm` divides the query gradients that it is given, in place.
#
# Versions: bergson 2.5.1, transformers 5.24.0, torch 2.13.0.
# Behaviour: the queries are moved to the index's device and dtype, which for float32 on a CPU is no copy, and then
# divided by their length where they lie. The caller's dictionary holds unit vectors afterwards.
# Surprise: a search is expected to read its query. Whoever asks an index of cosines and then one of plain products with
# the same gradients gets other scores than the other way round: of each query by its own length, so that they no longer
# compare between queries, and nothing is said.
# Way round: `{name: each.clone() for name, each in queries.items()}` for each search.
# Seen: "plain products before and after a search by cosines: 0.0838 to 0.174 times as large"
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0 accelerate datasets jaxtyping ml_dtypes natsort \
    peft petname scipy simple-parsing torchopt
"$work/venv/bin/pip" install --quiet --no-deps bergson==2.5.1 # without its requirements for images, sound and 4 bits
cd "$work"
HF_HUB_OFFLINE=1 TQDM_DISABLE=1 "$work/venv/bin/python" -W ignore - <<'PYTHON' 2> log | tail -1
import json
from pathlib import Path

import torch
from bergson.build import build
from bergson.config.config import DataConfig, IndexConfig, PreprocessConfig
from bergson.query.attributor import Attributor
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

words = ["<eos>", *(f"w{i}" for i in range(60))]
tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<eos>"))
tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>").save_pretrained("model")
torch.manual_seed(0)
sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 32}
config = LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=2, bos_token_id=None, eos_token_id=0)
LlamaForCausalLM(config).save_pretrained("model")
for name, rows in (("corpus", 24), ("held", 4)):
    texts = [" ".join(words[i] for i in torch.randint(1, 61, (12,))) for _ in range(rows)]
    Path(f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    about = {"model": "model", "data": DataConfig(f"{name}.jsonl"), "token_batch_size": 32, "projection_dim": 8}
    build(IndexConfig(run_path=name, **about), PreprocessConfig())

queries = {name: each.clone() for name, each in Attributor("held").grads.items()}
plain, cosines = Attributor("corpus"), Attributor("corpus", unit_norm=True)
before = plain.search(queries, 1)[0][:, 0]
cosines.search(queries, 1)
times = plain.search(queries, 1)[0][:, 0] / before
print("plain products before and after a search by cosines:", end=" ")
print(f"{times.min():.3g} to {times.max():.3g} times as large")
whole = torch.cat([*queries.values()], dim=1)
assert torch.allclose(whole.norm(dim=1), torch.ones(len(whole)), atol=1e-4)
assert (times - 1).abs().min() > 0.1 and times.max() / times.min() > 1.1
PYTHON
