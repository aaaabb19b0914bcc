#!/usr/bin/env bash
# A bank of twelve tiny GPT-2s that bergson retrains on halves of 48 documents, and what each tool makes of the other's
# scores on it. Run where `stride` is installed, with bergson in an environment of its own:
#
#   python3 -m venv VENV && VENV/bin/pip install torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu
#   VENV/bin/pip install transformers==5.24.0 accelerate datasets jaxtyping ml_dtypes natsort peft petname scipy \
#       simple-parsing torchopt && VENV/bin/pip install --no-deps bergson==2.5.1
#   bash tests/stride_cli/research/commands/bergson_bank.sh VENV WORK > tests/benchmarks/results/bergson.jsonl
#   tar -czf tests/stride_cli/research/commands/bergson_bank.tar.gz -C WORK \
#       corpus.jsonl held.jsonl bank by_bergson.npy by_stride judged         # for test_truth_import.py
set -euo pipefail
bergson=$(realpath "$1")/bin work=$2
mkdir -p "$work" && cd "$work"
export HF_HUB_OFFLINE=1 WANDB_MODE=disabled OMP_NUM_THREADS=1 HF_HOME=$PWD/cache
exec 3>&1 >&2

# 1. documents that count up through 39 words in steps of 1 to 8, with noise; an untrained model
"$bergson/python" - <<'PYTHON'
import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

torch.manual_seed(0)
words = ["<eos>", *(f"w{i}" for i in range(39))]
tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<eos>"))
tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
special = dict.fromkeys(("bos_token", "eos_token", "pad_token"), "<eos>")
PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=16, **special).save_pretrained("init")
sizes = {"vocab_size": 40, "n_positions": 16, "n_embd": 8, "n_layer": 1, "n_head": 2}
drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
GPT2LMHeadModel(GPT2Config(**sizes, **drops, bos_token_id=0, eos_token_id=0)).save_pretrained("init")
draw = torch.Generator().manual_seed(1)


def number(low, high):
    return int(torch.randint(low, high, (1,), generator=draw))


def document():
    step, place, found = number(1, 9), number(0, 39), []
    for _ in range(12):
        found.append(f"w{place}")
        place = (place + step) % 39 if number(0, 10) else number(0, 39)
    return " ".join(found)


for name, count in (("corpus", 48), ("held", 6)):
    rows = [{"id": str(row), "text": document()} for row in range(count)]
    Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
PYTHON

# 2. bergson: the model of all documents, its K-FAC scores, and twelve models of halves
training=(--batch_size 6 --num_epochs 10 --lr 0.01 --lr_scheduler_type constant --adam_beta2 0.999)
training+=(--model init --precision fp32 --wandb_project=)
"$bergson/bergson" train base "${training[@]}" --dataset corpus.jsonl --save_models true
"$bergson/bergson" ekfac scored --method kfac --use_dataset_labels true --model base/model --token_batch_size 16 \
    --index_cfg.precision fp32 --hessian_dtype fp32 --score_cfg.precision fp32 \
    --data.dataset corpus.jsonl --query.dataset held.jsonl --query.aggregation none
queries=(--data.dataset corpus.jsonl --query.dataset held.jsonl --aggregation none --method lds)
"$bergson/bergson" validate bank "${training[@]}" "${queries[@]}" --scores scored/scores --save_models true \
    --count 12 --fraction 0.5
rm -rf bank/checkpoints
"$bergson/python" - <<'PYTHON'
import numpy as np
from bergson.data import load_scores_loss_signed

scores, _ = load_scores_loss_signed("scored/scores")  # below zero: supports
np.save("by_bergson.npy", -scores.T.numpy())
PYTHON

# 3. STRIDE: the bank as the truth of an index, and scores that bergson judges
stride index build corpus.jsonl --model bank/retrained/base --form bare --out run.stride
stride evaluate truth --index run.stride --import bank --queries held.jsonl
stride baseline graddot --index run.stride --queries held.jsonl --scores by_stride > /dev/null
"$bergson/bergson" validate judged "${training[@]}" "${queries[@]}" --scores by_stride --subsets bank --paths bank
rm -rf bank/query_loss_cache

# 4. both tools on both tools' scores
python - >&3 <<'PYTHON'
import csv
import json
from pathlib import Path

import numpy as np

from index_format.reader import Index
from stride_cli.research.evaluation.metrics import lds
from stride_cli.research.training.truth import Truth

truth = Truth.from_index(Index.open("run.stride"))
n = len(truth.queries)
about = {"benchmark": "bergson", "bergson": "2.5.1", "models": truth.n_subsets, "queries": n, "documents": 48}
with open("bank/validation.csv") as file:
    changes = np.array([float(row["diff"]) for row in csv.DictReader(file)]).reshape(-1, n)
apart = np.abs(truth.base_losses - truth.losses[:, 0] - changes).max()
command = "bash tests/stride_cli/research/commands/bergson_bank.sh VENV WORK"
print(json.dumps({**about, "what": "losses", "largest_difference": float(apart), "command": command}))
layout = json.loads(Path("by_stride/info.json").read_text())["dtype"]
written = np.memmap("by_stride/scores.bin", dtype=np.dtype(layout), mode="r")
of_stride = -np.stack([written[f"score_{query}"] for query in range(n)])
for who, scores, judged in (("bergson", np.load("by_bergson.npy"), "bank"), ("stride", of_stride, "judged")):
    ours = lds(scores, truth.masks, truth.losses)
    with open(f"{judged}/summary.csv") as file:
        theirs = list(csv.DictReader(file))
    record = {**about, "what": "lds", "scores_of": who}
    for kind, mine in (("spearman", ours.spearman), ("pearson", ours.pearson)):
        other = np.array([float(row[f"{kind}_corr"]) for row in theirs])
        record[kind] = {"stride": float(mine.mean()), "bergson": float(other.mean())}
        record[kind]["largest_difference"] = float(np.abs(mine - other).max())
    print(json.dumps(record))
PYTHON
