#!/usr/bin/env bash
# From a corpus to attributed answers: examples/own_corpus.sh corpus.jsonl [DIRECTORY]
# The corpus holds one {"id", "text"} a line; the model is trained here, so its training set is known.
set -euo pipefail
corpus=$1
run=${2:-stride-run}
mkdir -p "$run"

stride index plan --chunks "$(wc -l <"$corpus")" >&2 # what an index of about this size costs
[ -d "$run/model" ] || stride model train "$corpus" --out "$run/model" >&2
[ -d "$run/run.stride" ] || stride index build "$corpus" --model "$run/model" --out "$run/run.stride" >&2
[ -d "$run/run.stride/operators" ] || stride train --index "$run/run.stride" >&2

# prompts from stdin, one a line: the first answer leaves before the last prompt arrives
stride query - --index "$run/run.stride" --top 3 |
  jq -c '{prompt, response, documents: [.hits[] | {document, share, passage}]}'
