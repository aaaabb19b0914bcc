#!/usr/bin/env bash
# Benchmark suite: selection. For every cluster of held-out tasks, SIZE documents are chosen out of an
# instruction corpus (by STRIDE, by BM25, at random), and a fresh base model is fine-tuned on them.
#
#   examples/suites/selection.sh instruct.jsonl.gz WORK [SIZE] [SEEDS]
#
# Corpus, base and model are those of finetuning.sh, and are taken over where WORK has them. METHOD is any method
# of `stride baseline --list`. Interrupted, it goes on where it was.
set -euo pipefail
pairs=$1 work=$2 size=${3:-150} seeds=${4:-2} method=${METHOD:-stride}
here=$(cd "$(dirname "$0")" && pwd)

[ -e "$work/corpus.jsonl" ] || python "$here/instructions.py" "$pairs" --out "$work" \
    ${PAIRS:+--pairs "$PAIRS"} ${QUERIES:+--queries "$QUERIES"}
[ -e "$work/base" ] || stride model train "$work/base.jsonl" --out "$work/base" \
    --layers 4 --width "${WIDTH:-128}" --vocab "${VOCAB:-2048}" --context 256 --epochs 4 >&2
[ -e "$work/model" ] || stride model finetune "$work/corpus.jsonl" --model "$work/base" --out "$work/model" --epochs 3 >&2
[ -e "$work/run.stride" ] || stride index build "$work/corpus.jsonl" --model "$work/model" --out "$work/run.stride" >&2
[ -e "$work/run.stride/operators" ] || stride train --index "$work/run.stride" >&2
[ -e "$work/tasks" ] || python "$here/selection.py" tasks "$pairs" "$work" \
    ${EACH:+--each "$EACH"} ${LEAST:+--least "$LEAST"} >&2

mkdir -p "$work/selected"
: > "$work/selection.partial"
for task in "$work"/tasks/*.task.jsonl; do
    name=$(basename "$task" .task.jsonl)
    out="$work/selected/$name-${method%%:*}-$size"
    [ -e "$out" ] || stride select "$task" --index "$work/run.stride" --size "$size" --method "$method" --out "$out" >&2
    stride evaluate selection "$out" --model "$work/base" --queries "${task%.task.jsonl}.test.jsonl" \
        --seeds "$seeds" --epochs "${EPOCHS:-4}" --batch-tokens "${BATCH_TOKENS:-1024}" --json >> "$work/selection.partial"
done
mv "$work/selection.partial" "$work/selection.jsonl"
python "$here/selection.py" table "$work"
