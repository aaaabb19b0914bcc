#!/usr/bin/env bash
# Acceptance suite of `stride audit`: a small model is fine-tuned on corpora into which benchmark problems were
# leaked, and the audit has to tell the leaked problems from clean ones and from those that it was not trained on.
#
#   examples/suites/contamination.sh DATA WORK [CELLS]
#
# DATA holds abc_news, movie_reviews, gsm8k_train and gsm8k_test (.jsonl.gz). CELLS are folders that
# contamination.py makes, "r1.0-s0 r1.0-s1 …"; `all` is all of them. What is there already is not made again.
#   MAKE                 options of contamination.py: sizes of the corpora
#   WIDTH, VOCAB         of the model
set -euo pipefail
data=$1 work=$2 cells=${3:-all}
here=$(cd "$(dirname "$0")" && pwd)

# shellcheck disable=SC2086 # options are words
python "$here/contamination.py" "$data/abc_news.jsonl.gz" "$data/movie_reviews.jsonl.gz" \
    --train "$data/gsm8k_train.jsonl.gz" --test "$data/gsm8k_test.jsonl.gz" --out "$work" ${MAKE:-}
[ "$cells" != all ] || cells=$(cd "$work" && echo r*-s*)
[ -e "$work/base" ] || stride model train "$work/base.jsonl" --out "$work/base" \
    --layers 4 --width "${WIDTH:-128}" --vocab "${VOCAB:-2048}" --context 512 --epochs "${BASE_EPOCHS:-2}"

# once FILE COMMAND…: stdout into FILE, which is there only when it is whole
once() {
    [ -e "$1" ] || { "${@:2}" >"$1.part" && mv "$1.part" "$1"; }
}

for cell in $cells; do
    at=$work/$cell seed=${cell##*-s}
    [ -e "$at/model" ] || stride model finetune "$at/corpus.jsonl" --model "$work/base" --out "$at/model" \
        --epochs "${EPOCHS:-3}" --lr "${LR:-2e-3}" --seed "$seed"
    once "$at/accuracy.jsonl" python "$here/contamination_accuracy.py" "$at/benchmark.jsonl" "$work/base" "$at/model"
    [ -e "$at/run.stride" ] || stride index build "$at/indexed.jsonl" --model "$at/model" --out "$at/run.stride"
    [ -e "$at/trained" ] || { stride train --index "$at/run.stride" --overwrite && touch "$at/trained"; }
    once "$at/audit.jsonl" stride audit "$at/benchmark.jsonl" --index "$at/run.stride" --controls "$at/controls.jsonl"
    for method in bm25 stride:stored=true logra:init=pca,layers=body; do
        name=${method%%:*}
        [ -e "$at/$name.npy" ] || stride baseline "$method" --index "$at/run.stride" --queries "$at/queries.jsonl" \
            --chat --scores "$at/$name.npy" --json --top 1 >"$at/$name.jsonl"
    done
done
# beside the controls of the file, those that a benchmark has itself, and those that the audit makes of it
for cell in $cells; do
    at=$work/$cell
    for kind in absent made; do
        once "$at/audit-$kind.jsonl" stride audit "$at/benchmark.jsonl" --index "$at/run.stride" --controls $kind \
            --controls-per-item "${MADE:-2}"
    done
done
