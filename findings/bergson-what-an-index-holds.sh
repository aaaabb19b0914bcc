#!/usr/bin/env bash
# A bergson index holds the square of `projection_dim` for each layer, and nothing of the head and the embeddings.
#
# Versions: bergson 2.5.1, transformers 5.24.0, torch 2.13.0.
# Behaviour: each linear layer's gradient is projected from both sides, so that 16 keeps 16 x 16 numbers. Gradients are of
# `model.base_model`, and there of linear layers, so that an untied output head, which has most of a small model's
# parameters, is not attributed at all. Two runs of `hessian_pipeline` draw the curvature's labels from the model without
# a seed, and their scores differ.
# Surprise: elsewhere (TRAK, dattri) the dimension is that of a whole row, so that rows "of 16" compare at other sizes. The
# same command twice is expected to give the same scores, and the configuration has seeds for everything else.
# Way round: the square root of the wanted size; `use_dataset_labels`, or `torch.manual_seed` in a run from Python.
# Seen: "7 layers of 256 numbers, head in none, scores of two runs differ by 40%"
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
from bergson.config.config import (
    DataConfig,
    HessianConfig,
    HessianPipelineConfig,
    IndexConfig,
    PreprocessConfig,
    QuerySetConfig,
    ScoreConfig,
)
from bergson.data import load_scores
from bergson.hessians.pipeline import hessian_pipeline
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

words = ["<eos>", *(f"w{i}" for i in range(60))]
tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<eos>"))
tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>").save_pretrained("model")
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=1,
    num_attention_heads=2,
    max_position_embeddings=32,
    bos_token_id=None,
    eos_token_id=0,
)
LlamaForCausalLM(config).save_pretrained("model")
for name, rows in (("corpus", 24), ("held", 4)):
    texts = [" ".join(words[i] for i in torch.randint(1, 61, (12,))) for _ in range(rows)]
    Path(f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def settings(path, **more):
    return IndexConfig(run_path=path, model="model", data=DataConfig("corpus.jsonl"), token_batch_size=32, **more)


build(settings("index", projection_dim=16), PreprocessConfig())
sizes = json.loads(Path("index/info.json").read_text())["grad_sizes"]


def scores(path):
    query = HessianPipelineConfig(query=QuerySetConfig("held.jsonl"))
    hessian_pipeline(settings(path), HessianConfig(method="kfac"), ScoreConfig(), PreprocessConfig(), query)
    return torch.tensor(load_scores(Path(path) / "scores")[:])


one, other = scores("one"), scores("other")
apart = ((one - other).norm() / one.norm()).item()
head = [name for name in sizes if "lm_head" in name or "embed" in name]
print(f"{len(sizes)} layers of {max(sizes.values())} numbers, head in {head or 'none'}", end=", ")
print(f"scores of two runs differ by {apart:.0%}")
assert set(sizes.values()) == {256} and not head and apart > 0.05
PYTHON
