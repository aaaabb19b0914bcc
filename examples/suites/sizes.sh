#!/usr/bin/env bash
# Benchmark suite: sizes. Models of several sizes are trained on the same texts and fine-tuned on the same pairs, and
# on the same random halves of them: does what counts words lose its lead as models grow?
#
#   examples/suites/sizes.sh instruct.jsonl.gz WORK [SUBSETS]
#
# SIZES are layers and width, "4x128 6x256 8x448": each has a folder, in which finetuning.sh works with its own
# variables. Corpus and queries are those of a 135 M-parameter model of that suite (PAIRS=480 QUERIES=60 LONGEST=350
# EPOCHS=2), whose row stands beside these.
set -euo pipefail
pairs=$1 work=$2 subsets=${3:-48}
here=$(cd "$(dirname "$0")" && pwd)
export EPOCHS=${EPOCHS:-2} BASE_EPOCHS=${BASE_EPOCHS:-3} KEEP=
export METHODS=${METHODS:-stride:stored=true,direct,pairs,pairs:shrink=true,tfidf,bm25,featsim,logra:rank=8,logra:rank=64,ekfac:layers=all}

[ -e "$work/corpus.jsonl" ] || python "$here/instructions.py" "$pairs" --out "$work" --pairs "${PAIRS:-480}" \
    --queries "${QUERIES:-60}" --longest "${LONGEST:-350}" --base "${OF_BASE:-3000}" --base-longest 700
for size in ${SIZES:-4x128 6x256 8x448}; do
    at=$work/$size
    mkdir -p "$at"
    for file in corpus queries base; do ln -sfn "../$file.jsonl" "$at/$file.jsonl"; done
    [ -e "$at/comparison.whole" ] || LAYERS=${size%x*} WIDTH=${size#*x} "$here/finetuning.sh" "$pairs" "$at" "$subsets" >&2
    : > "$at/comparison.whole"
    jq -c --arg size "$size" '. + {size: $size}' "$at/comparison.jsonl"
done
