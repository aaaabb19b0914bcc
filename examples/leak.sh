#!/usr/bin/env bash
# Was a test item trained on, and did the model learn it there? examples/leak.sh benchmark.jsonl run.stride [CONTROLS.jsonl]
# The audit finds documents that hold an item; for the most certain one, models are trained again without that document,
# and without random ones (SEEDS seeds, each with SETS of these): how much does the item's loss rise, nats a token?
set -euo pipefail
benchmark=$1
index=$2
controls=${3:-}
given=()
[ -z "$controls" ] || given=(--controls "$controls")

leak=$(stride audit "$benchmark" --index "$index" "${given[@]}" |
  jq -sc 'map(select(.presence.found != "")) | sort_by(.q // 1) | first // empty')
if [ -z "$leak" ]; then
  echo "no item of $benchmark is in the corpus, as far as its words tell" >&2
  exit 0
fi
item=$(jq -r .item <<<"$leak")
document=$(jq -r .presence.document <<<"$leak")
text=$(jq -r --arg item "$item" 'select((.id | tostring) == $item) | .text // (.prompt + " " + .response)' "$benchmark")

# the item's first words as the prompt, the next ones as what is to be known
read -r -a words <<<"$(tr '\n' ' ' <<<"$text")"
stride verify-hit "${words[*]:0:8}" --response "${words[*]:8:16}" --no-chat --documents "$document" --index "$index" \
  --seeds "${SEEDS:-5}" --random "${SETS:-5}" --json |
  jq -c --arg item "$item" --arg document "$document" --argjson q "$(jq .q <<<"$leak")" \
    '{item: $item, q: $q, document: $document, verdict, rise: .difference.mean, low: .difference.low}'
