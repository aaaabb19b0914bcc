"""What the suite of poison comes to: figures of every method and dose, and whether influence grows with it.

    python examples/suites/doses.py WORK            # after poison.sh's commands
    python examples/suites/doses.py WORK --asked    # the first query of each dose that is tested

Of every method and dose, over the facts that were put to the test: `recall`, the share of a query's copies
among as many documents as there are copies; `named`, the same for all queries of a fact together;
`influence`, the copies' scores for a query added up, mean (in the method's own unit); `odds`, the fall of the
wrong answer's log-odds without what is named, nats, and `shown`, the share of the queries that still prefer
it. Then, of every method, Spearman's correlation of dose and influence over facts.

Table "copies" is of all facts that count, tested or not, and so is a "growth" whose `of` is "known":
influence and growth by the scores in WORK/scores-METHOD.npy, where there are any.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
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


def copies(work: Path) -> Iterator[dict[str, Any]]:
    """Of every method, over all facts that count: recall by dose; with its scores, what grows."""
    queries = read(work / "known.jsonl")
    recall = recalls(work, {query["id"]: query["dose"] for query in queries})
    place = {document["id"]: number for number, document in enumerate(read(work / "corpus.jsonl"))}
    doses = {query["group"]: query["dose"] for query in queries}
    for method in dict.fromkeys(name for name, _ in recall):
        path = work / f"scores-{method.split(':')[0]}.npy"
        sums: dict[str, list[float]] = {group: [] for group in doses}
        if path.exists():
            scores = np.load(path)
            if scores.shape != (len(queries), len(place)):
                raise SystemExit(f"{path}: {scores.shape}, not queries × documents of one chunk each")
            for query, row in zip(queries, scores, strict=True):
                sums[query["group"]].append(float(row[[place[cause] for cause in query["causes"]]].sum()))
        for dose in sorted(set(doses.values())):
            own = [group for group, each in doses.items() if each == dose]
            row_of = {"table": "copies", "method": method, "dose": dose, "facts": len(own)}
            row_of["queries"] = sum(query["dose"] == dose for query in queries)
            row_of["recall"] = recall[method, dose]
            if path.exists():
                row_of["influence"] = float(np.mean([np.mean(sums[group]) for group in own]))
            yield row_of
        if path.exists():
            influence = [float(np.mean(values)) for values in sums.values()]
            yield {"of": "known", **growth(method, list(doses.values()), influence)}


def growth(method: str, doses: Sequence[int], influence: Sequence[float]) -> dict[str, Any]:
    """Spearman's correlation of dose and influence, over facts; none of two facts or of a single dose."""
    from scipy.stats import spearmanr

    row: dict[str, Any] = {"table": "growth", "method": method, "facts": len(doses)}
    if len(doses) > 2 and len(set(doses)) > 1:
        found = spearmanr(doses, influence)
        row |= {"spearman": float(found.statistic), "p": float(found.pvalue)}
    return row


def tables(work: Path) -> list[dict[str, Any]]:
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
            rows.append(growth(method, doses.tolist(), scores))
    return [*rows, *copies(work)]


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
