#!/usr/bin/env bash
# Benchmark suite: fine-tuning. A small model is trained on one half of a set of instructions as plain text and
# fine-tuned on the other (loss on the responses only), then fine-tuned again on random halves of that.
#
#   examples/suites/finetuning.sh instruct.jsonl.gz WORK [SUBSETS]
#
# instruct.jsonl.gz has one {"id", "prompt", "response"} a line. Interrupted, it goes on where it was. BASE is a model
# to fine-tune instead of a small one (a directory, a hub id or a .gguf file); PAIRS, LONGEST, QUERIES, LAYERS,
# WIDTH, VOCAB, EPOCHS, SEEDS and METHODS change what is run, WORKERS how many are trained at a time; KEEP, empty,
# keeps none of the retrained models.
set -euo pipefail
pairs=$1 work=$2 subsets=${3:-50}
here=$(cd "$(dirname "$0")" && pwd)

[ -e "$work/corpus.jsonl" ] || python "$here/instructions.py" "$pairs" --out "$work" \
    ${PAIRS:+--pairs "$PAIRS"} ${QUERIES:+--queries "$QUERIES"} ${LONGEST:+--longest "$LONGEST"}
base=${BASE:-$work/base}
[ -n "${BASE:-}" ] || [ -e "$base" ] || stride model train "$work/base.jsonl" --out "$base" \
    --layers "${LAYERS:-4}" --width "${WIDTH:-128}" --vocab "${VOCAB:-2048}" --context 256 --epochs "${BASE_EPOCHS:-4}"
[ -e "$work/model" ] || stride model finetune "$work/corpus.jsonl" --model "$base" --out "$work/model" \
    --epochs "${EPOCHS:-3}" --checkpoints 3
[ -e "$work/run.stride" ] || stride index build "$work/corpus.jsonl" --model "$work/model" --out "$work/run.stride"
if [[ ${METHODS:-} == *stored=true* ]] && [ ! -e "$work/run.stride/operators" ]; then
    stride train --index "$work/run.stride" --no-calibration
fi
stride evaluate truth --index "$work/run.stride" --queries "$work/queries.jsonl" \
    --subsets "$subsets" --seeds "${SEEDS:-1}" ${WORKERS:+--workers "$WORKERS"} --alpha 0.5 ${KEEP-"--keep=$work/retrained"}
stride evaluate compare --index "$work/run.stride" --alpha 0.5 --html "$work/comparison.html" --methods \
    "${METHODS:-stride,stride:buckets=2048,direct,tfidf,tfidf:ngrams=1,bm25,chance,rds,featsim,embeddings,dsir,graddot,logra,ekfac,trackstar,trak,less,datamodels}" \
    --json | tee "$work/comparison.jsonl"
