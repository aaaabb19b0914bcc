#!/usr/bin/env bash
# Proof by retraining, of a finished suite of habits or poison: models are trained again without the documents that
# each method names for all queries of a group, without as many random ones, and without the planted causes.
#
#   examples/suites/removal.sh WORK [SEEDS]
#
# METHODS may hold asked=response|token|odds and add=all|support (stride evaluate removal --help). STRIDE's main entry is
# the first below, settled before this suite was there; the others say what each half of it does. Interrupted, it goes
# on where it was.
set -euo pipefail
work=$1 seeds=${2:-3}
METHODS=${METHODS:-stride:stored=true,asked=token,add=support,stride:stored=true,stride:stored=true,add=support,stride:stored=true,asked=odds,stride:stored=true,asked=odds,add=support,bm25,embeddings,pairs}

stride evaluate removal --grouped --index "$work/run.stride" --queries "${QUERIES:-$work/known.jsonl}" --top causes \
    --seeds "$seeds" --draws "${DRAWS:-3}" ${WORKERS:+--workers "$WORKERS"} --methods "$METHODS" --json \
    >"$work/removal.part"
mv "$work/removal.part" "$work/removal.jsonl"
cat "$work/removal.jsonl"
