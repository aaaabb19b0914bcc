#!/usr/bin/env bash
# Is a benchmark in the training data? examples/audit.sh benchmark.jsonl run.stride [CONTROLS.jsonl] [LEVEL]
# In a shell: the items that are there. In a CI job: exit 1 where one was leaked and learnt (q < LEVEL),
# with audit.sarif for the code host to show at the benchmark's lines.
set -euo pipefail
benchmark=$1
index=$2
controls=${3:-}
level=${4:-0.05}
given=()
[ -z "$controls" ] || given=(--controls "$controls")

stride audit "$benchmark" --index "$index" "${given[@]}" |
  jq -c 'select(.verdict != "no evidence") | {item, verdict, reason, q, document: .presence.document}'

stride audit "$benchmark" --index "$index" "${given[@]}" --format sarif --level "$level" --fail-on-leak >audit.sarif
