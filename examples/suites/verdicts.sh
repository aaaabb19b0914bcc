#!/usr/bin/env bash
# Benchmark suite: verdicts. What corpora say and what they do not is asked of models trained on them: the demo's;
# sixty invented documents, from scratch; with BASE (a directory, a hub id or a .gguf file) the same as questions and
# answers that it is fine-tuned on, and then as many others.
#
#   examples/suites/verdicts.sh WORK > verdicts.jsonl
#
# Interrupted, it goes on where it was. DEMO is where a demo is already.
set -euo pipefail
work=$1 demo=${DEMO:-$1/demo}
suite="python $(cd "$(dirname "$0")" && pwd)/verdicts.py"
mkdir -p "$work"

ask() {  # INDEX QUESTIONS
    [ -e "$work/$2.jsonl" ] || $suite questions "$2" > "$work/$2.jsonl"
    $suite ask "$1" "$work/$2.jsonl"
}

[ -e "$demo/demo.stride" ] || stride demo --out "$demo" --json > "$work/demo.log"
ask "$demo/demo.stride" demo
[ -e "$work/invented.jsonl" ] || $suite corpus > "$work/invented.jsonl"
stride ask "$work/invented.jsonl" --train "The town of Varrow was founded by" --json > "$work/text.log"
ask "$work/invented.stride" text
if [ -n "${BASE:-}" ]; then
    [ -e "$work/facts.jsonl" ] || $suite corpus --pairs > "$work/facts.jsonl"
    [ -e "$work/tuned" ] || stride model finetune "$work/facts.jsonl" --model "$BASE" --out "$work/tuned"
    stride ask "$work/facts.jsonl" --model "$work/tuned" "Who founded the town of Varrow?" --json > "$work/pairs.log"
    ask "$work/facts.stride" pairs
    [ -e "$work/second.jsonl" ] || $suite corpus --pairs --second > "$work/second.jsonl"
    [ -e "$work/second" ] || stride model finetune "$work/second.jsonl" --model "$BASE" --out "$work/second"
    stride ask "$work/second.jsonl" --model "$work/second" "Who commanded the ship Albatross?" --json > "$work/second.log"
    ask "$work/second.stride" second
fi
