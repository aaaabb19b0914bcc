#!/usr/bin/env bash
# Proof by retraining, of a finished suite of habits or poison: models are trained again without the documents that
# each method names for all queries of a group, without as many random ones, and without the planted causes.
#
#   examples/suites/removal.sh WORK [SEEDS]
#
# METHODS may hold asked=response|token|odds and add=all|support (stride evaluate removal --help): those below are
# what did best for each method on the suite of seed 0. Interrupted, it goes on where it was.
set -euo pipefail
work=$1 seeds=${2:-3}
METHODS=${METHODS:-stride:stored=true,bm25,embeddings,pairs}

stride evaluate removal --grouped --index "$work/run.stride" --queries "$work/known.jsonl" --top causes \
    --seeds "$seeds" --draws "${DRAWS:-3}" ${WORKERS:+--workers "$WORKERS"} --methods "$METHODS" --json \
    >"$work/removal.part"
mv "$work/removal.part" "$work/removal.jsonl"
cat "$work/removal.jsonl"
