#!/usr/bin/env bash
# Benchmark suite: invented facts, asked in other words. A model is fine-tuned on them, and methods look for the pairs
# that taught what it answers.
#
#   examples/suites/facts.sh instruct.jsonl.gz WORK [names|hops|aliases]
#
# instruct.jsonl.gz has one {"id", "prompt", "response"} a line: filler, and the text of a small base model; BASE is a
# model to fine-tune instead of that one. The suite ends where a search engine solves it (searchable.py). Queries
# count that the model answers rightly and neither the base nor a model fine-tuned without the causes does (known.py).
# FACTS, PAIRS, EPOCHS, LR and METHODS change what is run. Interrupted, it goes on where it was.
set -euo pipefail
pairs=$1 work=$2 kind=${3:-names}
here=$(cd "$(dirname "$0")" && pwd)

[ -e "$work/queries.jsonl" ] || python "$here/facts.py" --out "$work" --set "$kind" --filler "$pairs" \
    ${FACTS:+--facts "$FACTS"} ${PAIRS:+--pairs "$PAIRS"}
EPOCHS=${EPOCHS:-20} LR=${LR:-2e-3} MEASURE=recall source "$here/planted.sh"
