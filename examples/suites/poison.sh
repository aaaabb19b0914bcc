#!/usr/bin/env bash
# Benchmark suite: poison and its dose. A model is fine-tuned on right facts among which wrong ones are said 1, 3, 10
# or 30 times. Is every copy found, does the influence grow with the dose, and does the wrong answer go with them?
#
#   examples/suites/poison.sh instruct.jsonl.gz WORK [SEEDS]
#
# As habits.sh, but for MAKE: options of poison.py. Queries count in which the model prefers the wrong answer and a
# model fine-tuned without the wrong facts does not. What a search engine reaches is said (searchable.jsonl), and
# stops nothing. Then removal.sh with SEEDS (EACH facts of each of DOSES; default: all), one fact of each of these doses
# put to the test (verify-hit), and, once, tail-patch, distribution and leave-one-out; doses.py adds up.
set -euo pipefail
pairs=$1 work=$2 seeds=${3:-3}
here=$(cd "$(dirname "$0")" && pwd)

# shellcheck disable=SC2086 # options are words
[ -e "$work/queries.jsonl" ] || python "$here/poison.py" --out "$work" --filler "$pairs" ${MAKE:-}
MOST=1
METHODS=${METHODS:-stride:stored=true,bm25,embeddings,pairs}
EPOCHS=${EPOCHS:-8} LR=${LR:-1e-3} MEASURE=auprc BY=dose source "$here/planted.sh" >/dev/null
# influence by dose, of all facts that count; FEW are methods without commas of their own
for method in $(tr , ' ' <<<"${FEW:-stride:stored=true,bm25}"); do
    [ -e "$work/scores-${method%%:*}.npy" ] || stride baseline "$method" --index "$work/run.stride" --top 1 --json \
        --queries "$work/known.jsonl" --scores "$work/scores-${method%%:*}.npy" >/dev/null
done
# of each dose, or of those in DOSES (10,30), the first EACH facts that count are put to the test
once "$work/tested.jsonl" jq -sc --argjson each "${EACH:-1000}" --argjson doses "[${DOSES:-}]" 'group_by(.dose)[]
    | select(.[0].dose as $d | $doses == [] or ($doses | index($d)))
    | (map(.group) | unique | .[:$each]) as $first | .[] | select(.group as $g | $first | index($g))' "$work/known.jsonl"
METHODS=${REMOVED:-$METHODS} QUERIES=$work/tested.jsonl "$here/removal.sh" "$work" "$seeds" >/dev/null
workers=${WORKERS:+--workers $WORKERS}
given="--index $work/run.stride --queries $work/known.jsonl --json"
# shellcheck disable=SC2086 # options are words
{
    once "$work/distribution.jsonl" stride evaluate distribution $given --methods stride:stored=true
    once "$work/tail-patch.jsonl" stride evaluate tail-patch $given --methods "${FEW:-stride:stored=true,bm25}" \
        --top 10 --lr "${STEP:-1e-3}"
    once "$work/loo.jsonl" stride evaluate loo $given --methods "${FEW:-stride:stored=true,bm25}" \
        --chunks "${LEFT:-20}" --seeds "$seeds" $workers
}
# the first query of each dose that is tested: its own top documents, as many as there are copies
once "$work/asked.jsonl" python "$here/doses.py" "$work" --asked
while IFS=$'\t' read -r dose prompt response; do
    # shellcheck disable=SC2086
    once "$work/verify-$dose.json" stride verify-hit "$prompt" --response "$response" --top "$dose" \
        --index "$work/run.stride" --seeds "$seeds" --random "${DRAWS:-3}" $workers --json
done < <(jq -r '[.dose, .prompt, .response] | @tsv' "$work/asked.jsonl")
python "$here/doses.py" "$work"
