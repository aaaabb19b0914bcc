"""What the suite of poison comes to: figures of every method and dose, and whether influence grows with it.

    python examples/suites/doses.py WORK            # after poison.sh's commands
    python examples/suites/doses.py WORK --asked    # the first query of each dose that is tested

Of every method and dose, over the facts that count: `recall`, the share of a query's copies among as many
documents as there are copies; `named`, the same for all queries of a fact together; `influence`, the copies'
scores for a query added up, mean (in the method's own unit); `odds`, the fall of the wrong answer's log-odds
without what is named, nats, and `shown`, the share of the queries that still prefer it. Then, of every
method, Spearman's correlation of dose and influence over facts.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def recalls(work: Path, doses: dict[str, int]) -> dict[tuple[str, int], float]:
    """(Method, dose) → mean over queries of the share of copies among as many documents."""
    found: dict[tuple[str, int], list[float]] = {}
    for record in read(work / "causes.jsonl"):
        if record["schema"] == "stride.cause_ranks/1":
            dose = doses[record["query"]]
            near = [cause["rank"] <= dose for cause in record["causes"]]
            found.setdefault((record["method"], dose), []).append(float(np.mean(near)))
    return {key: float(np.mean(values)) for key, values in found.items()}


def tables(work: Path) -> list[dict[str, Any]]:
    from scipy.stats import spearmanr

    queries = read(work / "known.jsonl")
    dose_of = {query["group"]: query["dose"] for query in queries}
    recall = recalls(work, {query["id"]: query["dose"] for query in queries})
    rows: list[dict[str, Any]] = []
    for record in read(work / "removal.jsonl"):
        method, groups = record["method"], record["groups"]
        plain = method.replace(",asked=token", "").replace(",asked=odds", "").replace(",add=support", "")
        doses = np.array([dose_of[group["group"]] for group in groups])
        for dose in sorted(set(doses.tolist())):
            own = [group for group, each in zip(groups, doses, strict=True) if each == dose]
            row = {"table": "doses", "method": method, "dose": int(dose), "facts": len(own)}
            row["queries"] = sum(group["queries"] for group in own)
            if own[0]["causes_score"] is not None:
                row["recall"] = recall.get((plain, int(dose)))
                row["named"] = float(np.mean([group["causes_removed"] / group["k"] for group in own]))
                row["influence"] = float(np.mean([g["causes_score"] / g["queries"] for g in own]))
            row |= {name: float(np.mean([group[name] for group in own])) for name in ("odds", "shown")}
            rows.append(row)
        if groups[0]["causes_score"] is not None:
            scores = [group["causes_score"] / group["queries"] for group in groups]
            found = spearmanr(doses, scores)
            rows.append({"table": "growth", "method": method, "facts": len(groups)})
            rows[-1] |= {"spearman": float(found.statistic), "p": float(found.pvalue)}
    return rows


def asked(work: Path) -> list[dict[str, Any]]:
    first: dict[int, dict[str, Any]] = {}
    for query in read(work / "tested.jsonl"):
        first.setdefault(query["dose"], query)
    return [{key: query[key] for key in ("dose", "prompt", "response")} for query in first.values()]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("work", type=Path)
    parser.add_argument("--asked", action="store_true", help="the first query of each dose, instead")
    chosen = parser.parse_args()
    for row in asked(chosen.work) if chosen.asked else tables(chosen.work):
        print(json.dumps(row, ensure_ascii=False))


if __name__ == "__main__":
    main()
