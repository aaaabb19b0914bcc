#!/usr/bin/env bash
# What the suites have in common: train, index, fit operators, retrain on random subsets, compare methods.
# examples/vision/suite.sh DATA DIRECTORY; what is there already is used again, so an interrupted run goes on.
#   TRAIN                options of `stride model train`
#   SUBSETS, SEEDS       of the ground truth, for each share of the rows in ALPHAS
#   METHODS, RESPONSES   what is compared, on losses and margins of the retrained models
set -euo pipefail
data=$1
run=$2
alphas=${ALPHAS:-0.5 0.3}
methods=${METHODS:-stride,direct,chance,featsim,graddot,trak,ekfac,logra}
mkdir -p "$run"

# shellcheck disable=SC2086 # options are words
[ -d "$run/model" ] || stride model train "$data" --out "$run/model" $TRAIN >&2
[ -d "$run/run.stride" ] || stride index build "$data" --model "$run/model" --out "$run/run.stride" >&2
[ -d "$run/run.stride/operators" ] || stride train --index "$run/run.stride" >&2
for alpha in $alphas; do
  stride evaluate truth --index "$run/run.stride" --queries held-out \
    --subsets "${SUBSETS:-100}" --seeds "${SEEDS:-5}" --alpha "$alpha" >&2
done
for alpha in $alphas; do
  for response in ${RESPONSES:-loss margin}; do
    stride evaluate compare --index "$run/run.stride" --methods "$methods" --alpha "$alpha" \
      --response "$response" --html "$run/compare-$response-$alpha.html" --json
  done
done
