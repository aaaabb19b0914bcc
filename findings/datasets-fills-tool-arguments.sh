#!/usr/bin/env bash
# datasets adds arguments to tool calls that nobody wrote, or does not, depending on how the same rows came in.
#
# Version: datasets 5.2.0.
# Behaviour: load_dataset("json") keeps arguments of differing keys as JSON. Dataset.from_list makes one struct of all
# keys, so that every row has every other row's keys, with None.
# Surprise: the same two rows give two corpora. A chat template prints the added keys as null, so a model sees, and an
# attribution tokenises, calls that are in no file.
# Way round: keep arguments as strings of JSON, or read JSON Lines without from_list.
# Seen: "from a file {'x': 1}, from a list {'x': 1, 'y': None}"
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet datasets==5.2.0
cd "$work"
"$work/venv/bin/python" -W ignore - <<'PYTHON'
import json
from pathlib import Path

import datasets

calls = [("add", {"x": 1}), ("say", {"y": "z"})]
rows = [{"messages": [{"role": "assistant", "tool_calls": [{"name": n, "arguments": a}]}]} for n, a in calls]
Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
datasets.disable_progress_bars()
read = datasets.load_dataset("json", data_files="rows.jsonl", split="train", cache_dir="cache")
made = datasets.Dataset.from_list(rows)
found = [data[0]["messages"][0]["tool_calls"][0]["arguments"] for data in (read, made)]
print("from a file {}, from a list {}".format(*found))
assert found == [{"x": 1}, {"x": 1, "y": None}]
PYTHON
