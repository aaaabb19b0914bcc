#!/usr/bin/env bash
# Which documents taught the model this habit? examples/habit.sh run.stride habit.jsonl [TOP] [TESTED]
# habit.jsonl holds prompts at which the model shows it, what it says, and what it would say without: one
# {"prompt", "response", "instead"} a line. All of them are answered as one: what supports each is added up, and a document
# that competes with one prompt's words is no evidence against it.
# With TESTED, models are trained again without so many of the documents, and without random ones (SEEDS seeds, each with
# SETS of these): how far do the log-odds of what is said against what would be said fall, nats, as a mean over all prompts?
set -euo pipefail
index=$1
habit=$2
top=${3:-20}
tested=${4:-0}

answer=$(stride query --file "$habit" --pool --index "$index" --top "$top" --json)
jq -c '.pooled as $prompts | .hits[] | {document, share, prompts: $prompts, passage}' <<<"$answer"

if [ "$tested" -gt 0 ]; then
  documents=$(jq -r "[.hits[:$tested][].document] | join(\",\")" <<<"$answer")
  stride verify-hit --file "$habit" --documents "$documents" --index "$index" \
    --seeds "${SEEDS:-5}" --random "${SETS:-5}" --json |
    jq -c '{tested: [.documents[].document], prompts: .pooled, verdict, fall: .difference.mean, low: .difference.low}'
fi
