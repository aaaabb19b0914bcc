#!/usr/bin/env bash
# Pages about a file of prompts: examples/report.sh run.stride prompts.txt [answers.jsonl]
# The prompts stand one a line, or as JSON Lines of {"id"?, "prompt", "response"?, "span"?}; report.png shows
# what comes out. Answers saved by `stride query --json` make a page without index or model; here, of those
# where some document stands out.
set -euo pipefail
index=$1
prompts=$2
answers=${3:-}

stride report --file "$prompts" --index "$index" --out report.html --json
if [ -n "$answers" ]; then
  clear=$(jq -c 'select([.hits[], .opposers[] | .share] | max >= 0.1)' "$answers")
  [ -z "$clear" ] || stride report --answers - --title "Clear cases" --out clear.html --json <<<"$clear"
fi
