"""Task clusters for the selection suite, and the table of what each selection was worth.

    python examples/suites/selection.py tasks instruct.jsonl.gz WORK [--each 12]
    python examples/suites/selection.py table WORK

A cluster is the tool that a pair's prompt offers ("toolformer access: shell"). `tasks` holds out pairs of
every cluster, none of them in WORK/corpus.jsonl or WORK/base.jsonl: half to select for
(WORK/tasks/TOOL.task.jsonl), half to be judged by (TOOL.test.jsonl). `table` reads the records of
`stride evaluate selection`, WORK/selection.jsonl.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
from pathlib import Path

import numpy as np

from stride_cli.randomness import stream

LONGEST = 400  # characters of prompt and response together, as instructions.py


def read(path: Path) -> list[dict]:
    content = path.read_bytes()
    content = gzip.decompress(content) if path.suffix == ".gz" else content
    return [json.loads(line) for line in content.splitlines()]


def tool(row: dict) -> str | None:
    """The tool that a prompt offers."""
    found = re.search(r"toolformer access: *(\w+)", row["prompt"])
    return found[1].lower() if found else None


def write_tasks(pairs: Path, work: Path, each: int, least: int) -> None:
    """Two files of `each` held-out pairs for every tool that `least` pairs of the corpus are about."""
    known = {row["id"] for name in ("corpus", "base") for row in read(work / f"{name}.jsonl")}
    corpus = [tool(row) for row in read(work / "corpus.jsonl")]
    rest: dict[str, list[dict]] = {}
    for row in read(pairs):
        name = tool(row)
        short = len(row["prompt"]) + len(row["response"]) <= LONGEST and row["response"].strip()
        if name and short and row["id"] not in known and corpus.count(name) >= least:
            rest.setdefault(name, []).append({**row, "task": name})
    (work / "tasks").mkdir(exist_ok=True)
    for name, rows in sorted(rest.items()):
        if len(rows) < 2 * each:
            print(f"{name}: {len(rows)} pairs left, {2 * each} needed; left out")
            continue
        order = stream(0, f"selection tasks {name}").permutation(len(rows))[: 2 * each]
        for kind, chosen in (("task", order[:each]), ("test", order[each:])):
            lines = [json.dumps(rows[int(i)], ensure_ascii=False) for i in chosen]
            (work / "tasks" / f"{name}.{kind}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        print(f"{name}: {corpus.count(name)} pairs in the corpus, {2 * each} held out")


def write_table(work: Path) -> None:
    """Of every method, random and BM25 documents: means over tasks; standard deviation over tasks, and over
    seeds within a task; differences of the first method to all others, paired by task, and of STRIDE by
    influences on another model."""
    found: dict[str, dict[str, dict]] = {}
    runs = [path for path in (work / "selection.jsonl", work / "selection-base.jsonl") if path.exists()]
    for record in (each for path in runs for each in read(path)):
        name = record["method"] if record["set"] == "chosen" else record["set"]
        found.setdefault(name, {})[record["tasks"][0]["task"]] = record
    first = next(name for name in found if name not in ("base", "random", "bm25"))
    tasks = sorted(found[first])
    for measure in ("f1", "loss"):
        values = {name: np.array([rows[t][measure]["mean"] for t in tasks]) for name, rows in found.items()}
        for name, mean in values.items():
            over_seeds = np.array([found[name][t][measure]["sd"] or np.nan for t in tasks], float)
            row = {
                "suite": "selection",
                "measure": measure,
                "set": name,
                "tasks": len(tasks),
                "seeds": found[name][tasks[0]]["seeds"],
                "mean": float(mean.mean()),
                "sd_tasks": float(mean.std(ddof=1)),
                "sd_seeds": None if np.isnan(over_seeds).any() else float(np.sqrt((over_seeds**2).mean())),
            }
            print(json.dumps(row))
        pairs = [
            (own, other) for own in values if own == first or own.startswith("stride") for other in values
        ]
        for own, other in pairs:
            if other in ("base", own):
                continue
            difference = values[own] - values[other]
            against = {
                "suite": "selection",
                "measure": measure,
                "set": own,
                "minus": other,
                "mean": float(difference.mean()),
                "se_tasks": float(difference.std(ddof=1) / np.sqrt(len(tasks))),
                "tasks_above": int((difference > 0).sum()),
                "tasks": len(tasks),
            }
            print(json.dumps(against))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    tasks = commands.add_parser("tasks")
    tasks.add_argument("pairs", type=Path, help="JSON Lines of {id, prompt, response}, also .gz")
    tasks.add_argument("work", type=Path)
    tasks.add_argument("--each", type=int, default=12, help="queries to select for, and as many to judge by")
    tasks.add_argument("--least", type=int, default=100, help="pairs of a cluster in the corpus")
    commands.add_parser("table").add_argument("work", type=Path)
    chosen = parser.parse_args()
    if chosen.command == "tasks":
        write_tasks(chosen.pairs, chosen.work, chosen.each, chosen.least)
    else:
        write_table(chosen.work)


if __name__ == "__main__":
    main()
