#!/usr/bin/env bash
# Leaks in other words: problems planted in a fine-tuning corpus as copies, with light edits, and rewritten, and as many
# that are planted in the index alone. The audit has nothing but the corpus, the model and the benchmark (its controls
# are the problems without a copy), and may call only those leaked that the model was trained on.
#
#   examples/suites/leaks.sh DATA WORK [CELLS] > leaks.jsonl
#
# DATA holds gsm8k_train, gsm8k_test and instruct_gpteacher (.jsonl.gz). CELLS are folders that leaks.py makes,
# "r1.0-s0 r1.0-s1 …"; `all` is all of them. What is there already is not made again.
#   MAKE                 options of leaks.py: sizes of the corpora, --held-back
#   WIDTH, VOCAB         of the model
#   METHODS              what searches beside the audit
set -euo pipefail
data=$1 work=$2 cells=${3:-all}
here=$(cd "$(dirname "$0")" && pwd)

# shellcheck disable=SC2086 # options are words
python "$here/leaks.py" "$data/gsm8k_train.jsonl.gz" "$data/gsm8k_test.jsonl.gz" \
    --filler "$data/instruct_gpteacher.jsonl.gz" --out "$work" ${MAKE:-}
[ "$cells" != all ] || cells=$(cd "$work" && echo r*-s*)
[ -e "$work/base" ] || stride model train "$work/base.jsonl" --out "$work/base" \
    --layers 4 --width "${WIDTH:-128}" --vocab "${VOCAB:-2048}" --context 512 --epochs "${BASE_EPOCHS:-2}" >&2

# once FILE COMMAND…: stdout into FILE, which is there only when it is whole
once() {
    [ -e "$1" ] || { "${@:2}" >"$1.part" && mv "$1.part" "$1"; }
}

for cell in $cells; do
    at=$work/$cell seed=${cell##*-s}
    [ -e "$at/model" ] || stride model finetune "$at/corpus.jsonl" --model "$work/base" --out "$at/model" \
        --epochs "${EPOCHS:-3}" --lr "${LR:-2e-3}" --seed "$seed" >&2
    [ -e "$at/run.stride" ] || stride index build "$at/indexed.jsonl" --model "$at/model" --out "$at/run.stride" >&2
    # what only queries need is left out
    [ -e "$at/trained" ] || { stride train --index "$at/run.stride" --overwrite --no-calibration --project 0 >&2 &&
        touch "$at/trained"; }
    once "$at/audit.jsonl" stride audit "$at/benchmark.jsonl" --index "$at/run.stride" --controls absent
    for method in ${METHODS:-bm25 embeddings}; do
        [ -e "$at/$method.npy" ] || stride baseline "$method" --index "$at/run.stride" --top 1 --json \
            --queries "$at/benchmark.jsonl" --scores "$at/$method.npy" >"$at/$method.jsonl"
    done
done
# shellcheck disable=SC2086
python "$here/leaks_tables.py" "$work" $cells
