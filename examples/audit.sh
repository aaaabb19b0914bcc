#!/usr/bin/env bash
# Is a benchmark in the training data? examples/audit.sh benchmark.jsonl run.stride [CONTROLS.jsonl] [Q]
# In a shell: the suspicious items, most certain first. In a CI job: exit 1 where an item's q-value is up to Q,
# with audit.sarif for the code host to show at the benchmark's lines.
set -euo pipefail
benchmark=$1
index=$2
controls=${3:-}
level=${4:-0.05}
given=()
[ -z "$controls" ] || given=(--controls "$controls")

stride audit "$benchmark" --index "$index" "${given[@]}" |
  jq -c 'select(.verdict != "no evidence") | {item, verdict, q, document: .lexical.document}'

stride audit "$benchmark" --index "$index" "${given[@]}" --format sarif --fail-on-leak "$level" >audit.sarif
