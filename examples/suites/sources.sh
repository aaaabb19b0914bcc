#!/usr/bin/env bash
# Benchmark suite: sources against anti-documents. A model is fine-tuned on articles about things that do not exist,
# two paraphrases of each and two documents of its topic that leave the answer out (sources.py); methods look for what
# taught the answers.
#
#   examples/suites/sources.sh WORK > sources.jsonl
#
# The model is a small one that has read the like about other things, or BASE (a directory, a hub id or a .gguf file).
# Queries count that it answers rightly, and neither the base nor a model of the anti-documents alone does (known.py).
# SEED, MAKE, EPOCHS, LR, TRAIN, METHODS, MOST (known queries) and CONTROL, empty for no such model, change what is run.
# Interrupted, it goes on where it was.
set -euo pipefail
work=$1
here=$(cd "$(dirname "$0")" && pwd)

# shellcheck disable=SC2086 # options are words
[ -e "$work/base.jsonl" ] || python "$here/sources.py" make --out "$work" --seed "${SEED:-0}" ${MAKE:-}
base=${BASE:-$work/base}
[ -e "$base" ] || [ -n "${BASE:-}" ] || stride model train "$work/base.jsonl" --out "$base" \
    --layers "${LAYERS:-4}" --width "${WIDTH:-128}" --vocab "${VOCAB:-2048}" --context 128 \
    --epochs "${BASE_EPOCHS:-10}" >&2

taught() {  # CORPUS OUT
    [ -e "$2" ] || stride model finetune "$1" --model "$base" --out "$2" --epochs "${EPOCHS:-12}" --lr "${LR:-2e-3}" \
        --batch-tokens 1024 >&2
}

taught "$work/corpus.jsonl" "$work/model"
others=("$base")
if [ -n "${CONTROL-yes}" ]; then
    taught "$work/without.jsonl" "$work/control"
    others+=("$work/control")
fi
[ -e "$work/known.out" ] || { python "$here/known.py" "$work/queries.jsonl" --model "$work/model" --not "${others[@]}" \
    --plain --by kind --out "$work/every.jsonl" >"$work/known.part" && mv "$work/known.part" "$work/known.out"; }
python "$here/sources.py" first "$work/every.jsonl" | sed "${MOST:-1000}q" >"$work/known.jsonl"
[ -e "$work/run.stride" ] || stride index build "$work/corpus.jsonl" --model "$work/model" --out "$work/run.stride" >&2
# shellcheck disable=SC2086
[ -e "$work/run.stride/operators" ] || stride train --index "$work/run.stride" --no-calibration ${TRAIN:-} >&2
methods=stride:stored=true,bm25,tfidf,embeddings,featsim,pairs,logra,logra:residuals=average
methods+=,ekfac:layers=all,ekfac:layers=all,residuals=average,rds,chance
stride evaluate causes --index "$work/run.stride" --queries "$work/known.jsonl" --at 1,3,10 --write-scores "$work/scores" \
    --json --methods "${METHODS:-$methods}" >"$work/causes.jsonl"
cat "$work/known.out"
python "$here/sources.py" tables "$work/known.jsonl" --corpus "$work/corpus.jsonl" --scores "$work/scores"
