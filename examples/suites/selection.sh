#!/usr/bin/env bash
# Benchmark suite: selection. For every cluster of held-out tasks, SIZE documents are chosen out of an
# instruction corpus (by each of SELECTORS, by BM25, at random), and a fresh base model is fine-tuned on them.
#
#   examples/suites/selection.sh instruct.jsonl.gz WORK [SIZE] [SEEDS]
#
# Corpus, base and model are those of finetuning.sh, and are taken over where WORK has them. SELECTORS, words with
# spaces between, are methods of `stride baseline --list`. OF=base takes influences on the base model, before it is
# fine-tuned on all documents; its methods are called METHOD@base, and stand beside those that were run before.
# Interrupted, it goes on where it was.
set -euo pipefail
pairs=$1 work=$2 size=${3:-150} seeds=${4:-2}
read -ra methods <<< "${SELECTORS:-stride}"
of=${OF:-model} suffix=
[ "$of" = model ] || suffix=@$of
index=$work/run${suffix/@/-}.stride found=$work/selection${suffix/@/-}
here=$(cd "$(dirname "$0")" && pwd)

[ -e "$work/corpus.jsonl" ] || python "$here/instructions.py" "$pairs" --out "$work" \
    ${PAIRS:+--pairs "$PAIRS"} ${QUERIES:+--queries "$QUERIES"}
[ -e "$work/base" ] || stride model train "$work/base.jsonl" --out "$work/base" \
    --layers 4 --width "${WIDTH:-128}" --vocab "${VOCAB:-2048}" --context 256 --epochs 4 >&2
[ -e "$work/model" ] || stride model finetune "$work/corpus.jsonl" --model "$work/base" --out "$work/model" --epochs 3 >&2
[ -e "$index" ] || stride index build "$work/corpus.jsonl" --model "$work/$of" --out "$index" >&2
[ -e "$index/operators" ] || stride train --index "$index" >&2
[ -e "$work/tasks" ] || python "$here/selection.py" tasks "$pairs" "$work" \
    ${EACH:+--each "$EACH"} ${LEAST:+--least "$LEAST"} >&2

mkdir -p "$work/selected"
: > "$found.partial"
for task in "$work"/tasks/*.task.jsonl; do
    name=$(basename "$task" .task.jsonl)
    shared="$work/selected/$name-$size.scores"
    mkdir -p "$shared"
    for method in "${methods[@]}"; do
        out="$work/selected/$name-${method//[^a-z0-9]/-}${suffix/@/-}-$size"
        [ -e "$out" ] || stride select "$task" --index "$index" --size "$size" --method "$method" \
            --out "$out" >&2
        # what random and BM25 documents are worth is the same beside every method
        mkdir -p "$out/evaluation"
        cp "$shared"/*.json "$out/evaluation" 2>/dev/null || true
        stride evaluate selection "$out" --model "$work/base" --queries "${task%.task.jsonl}.test.jsonl" \
            --seeds "$seeds" --epochs "${EPOCHS:-4}" --batch-tokens "${BATCH_TOKENS:-1024}" --json |
            jq -c --arg method "$method$suffix" '. + {method: $method}' >> "$found.partial"
        cp "$out"/evaluation/*.json "$shared"
    done
done
mv "$found.partial" "$found.jsonl"
python "$here/selection.py" table "$work"
