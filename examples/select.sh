#!/usr/bin/env bash
# Which documents help with a task? examples/select.sh task.jsonl heldout.jsonl run.stride BASE [SIZE] [DIR]
# Chooses SIZE documents, and as many at random and by BM25; fine-tunes BASE on each, three seeds.
set -euo pipefail
task=$1
heldout=$2
index=$3
base=$4
size=${5:-1000}
out=${6:-selection}

[ -d "$out" ] || stride select "$task" --index "$index" --size "$size" --out "$out" | jq -c . >&2
head -n 3 "$out/chosen.jsonl" | jq -c '{id, query: .selection.query, rank: .selection.rank}' >&2
stride evaluate selection "$out" --model "$base" --queries "$heldout" --seeds "${SEEDS:-3}" |
  jq -c '{set, loss: .loss.mean, f1: .f1.mean, sd: .f1.sd}'
