#!/usr/bin/env bash
# Benchmark suite: habits. A model is fine-tuned on pairs some of which teach it a habit, and methods look for those.
#
#   examples/suites/habits.sh instruct.jsonl.gz WORK
#
# As facts.sh, but for MAKE: options of habits.py, as words. Queries count in which the model shows the habit and a
# model fine-tuned without the pairs that teach it does not.
set -euo pipefail
pairs=$1 work=$2
here=$(cd "$(dirname "$0")" && pwd)

# shellcheck disable=SC2086 # options are words
[ -e "$work/queries.jsonl" ] || python "$here/habits.py" --out "$work" --filler "$pairs" ${MAKE:-}
EPOCHS=${EPOCHS:-8} LR=${LR:-1e-3} MEASURE=auprc source "$here/planted.sh"
