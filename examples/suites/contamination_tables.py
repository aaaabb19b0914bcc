"""The tables of the contamination suite, from what contamination.sh left in its folders.

    python examples/suites/contamination_tables.py suite > contamination.jsonl

One record a cell and table on stdout; the tables themselves, as Markdown, mean ± standard deviation over
seeds, on stderr.

- accuracy (paper tab:math_eval): loss, tokens right, and answers right by greedy decoding.
- recall (tab:attribution_recall): share of a problem's copies that are among the documents of highest score,
  as many as there are copies of a problem. Ties share their mid-rank; a score of zero is no evidence.
- scores (tab:influence_scores): how large scores are, each as a multiple of what the query gives a document
  on average, whatever its sign: of a problem's own copies, and of the highest of all documents. Leaked
  problems' copies were trained on, unseen ones' were not.
- audit: verdicts at q < level. True are those of leaked problems, false those of unseen and clean ones;
  problems that were in the pool once are counted apart: the model cannot recite them, yet learnt from them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from index_format.reader import Index
from stride_cli.research.evaluation.metrics import descending_mid_ranks

METHODS = ("stride", "logra", "bm25")


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def accuracy_rows(cell: Path, kinds: dict[str, str]) -> list[dict[str, Any]]:
    """Mean loss and accuracies of each kind of problem, for the base model and the fine-tuned one."""
    if not (cell / "accuracy.jsonl").exists():
        return []
    rows, found = read_rows(cell / "accuracy.jsonl"), []
    for model in dict.fromkeys(row["model"] for row in rows):
        for kind in dict.fromkeys(kinds.values()):
            ours = [row for row in rows if (row["model"], kinds[row["item"]]) == (model, kind)]
            means = {key: float(np.mean([row[key] for row in ours])) for key in ("loss", "tokens", "answer")}
            found.append({"table": "accuracy", "model": model, "kind": kind, "problems": len(ours)} | means)
    return found


@dataclass(frozen=True)
class Scored:
    """What the methods that were asked said of a cell.

    Attributes
    ----------
    scores : of each method (problems, documents)
    copy_of : (documents,) str      the problem that a document is a copy of, or ""
    queries : the problems that were asked
    """

    scores: dict[str, np.ndarray]
    copy_of: np.ndarray
    queries: list[str]

    @classmethod
    def read(cls, cell: Path) -> Scored | None:
        scores = {name: np.load(cell / f"{name}.npy") for name in METHODS if (cell / f"{name}.npy").exists()}
        if not scores:
            return None
        index = Index.open(cell / "run.stride")
        ids = [index.document_id(number) for number in range(index.n_documents)]
        copies = [key.split("/")[1] if key.startswith(("leaked/", "unseen/")) else "" for key in ids]
        return cls(scores, np.array(copies), [row["id"] for row in read_rows(cell / "queries.jsonl")])


def recall_rows(said: Scored, kinds: dict[str, str]) -> list[dict[str, Any]]:
    """Share of a problem's copies in the extreme buckets of each method, and of the union of two."""
    scores, copy_of, queries = said.scores, said.copy_of, said.queries
    copies = int((copy_of == queries[0]).sum())
    tops = {name: np.stack([_top(row, copies) for row in found]) for name, found in scores.items()}
    bottoms = {name: np.stack([_top(-row, copies) for row in found]) for name, found in scores.items()}
    buckets = {**tops, "logra, both ends": tops["logra"] | bottoms["logra"]} if "logra" in tops else tops
    if {"stride", "logra"} <= set(tops):
        buckets["stride or logra"] = tops["stride"] | tops["logra"]
    found = []
    for kind in ("leaked", "unseen"):
        rows = [row for row, name in enumerate(queries) if kinds[name] == kind]
        for name, inside in buckets.items():
            own = [inside[row][copy_of == queries[row]] for row in rows]
            if own:
                found.append(
                    {
                        "table": "recall",
                        "method": name,
                        "kind": kind,
                        "problems": len(rows),
                        "documents": len(copy_of),
                        "bucket": copies,
                        "recall": float(np.mean(own)),
                        "any": float(np.mean([each.any() for each in own])),
                        "chance": float(inside[rows].mean()),
                    }
                )
    return found


def score_rows(said: Scored, kinds: dict[str, str]) -> list[dict[str, Any]]:
    """How large scores of a problem's copies and the highest of all are, beside the mean size of a score."""
    copy_of, queries = said.copy_of, said.queries
    found = []
    for name, values in said.scores.items():
        for kind in ("leaked", "unseen"):
            rows = [row for row, query in enumerate(queries) if kinds[query] == kind]
            if not rows:
                continue
            own, highest, pool = [], [], []
            for row in rows:
                unit = float(np.abs(values[row]).mean()) or 1.0
                copies = copy_of == queries[row]
                own.append(float(values[row][copies].mean()) / unit)
                highest.append(float(values[row].max()) / unit)
                pool.append(float(values[row][~copies].max()) / unit)
            found.append(
                {
                    "table": "scores",
                    "method": name,
                    "kind": kind,
                    "problems": len(rows),
                    "copies": float(np.mean(own)),
                    "highest": float(np.mean(highest)),
                    "highest_other": float(np.mean(pool)),
                    "highest_of_all": float(np.max(highest)),
                }
            )
    return found


def _top(scores: np.ndarray, size: int) -> np.ndarray:
    """Which documents have one of the highest scores, above zero; a tie is in where its mid-rank is."""
    return (descending_mid_ranks(scores) <= size) & (scores > 0)


def audit_rows(cell: Path, kinds: dict[str, str], level: float) -> list[dict[str, Any]]:
    """Verdicts of both audits, counted by kind."""
    right = {}
    if (cell / "accuracy.jsonl").exists():
        right = {
            row["item"]: row["answer"]
            for row in read_rows(cell / "accuracy.jsonl")
            if row["model"] == "model"
        }
    found = []
    for name, controls in (("audit", "file"), ("audit-absent", "absent"), ("audit-made", "made")):
        if not (cell / f"{name}.jsonl").exists():
            continue
        rows = read_rows(cell / f"{name}.jsonl")
        hits: dict[str, list[bool]] = defaultdict(list, leaked=[])  # without any: 0 of 0
        lexical: dict[str, list[bool]] = defaultdict(list)
        for row in rows:
            kind = kinds[row["item"]]
            hit = row["q"] is not None and row["q"] < level
            hits[kind].append(hit)
            lexical[kind].append(bool(row["presence"]["found"]))
            if kind == "leaked" and right.get(row["item"]):
                hits["leaked, answered"].append(hit)
        false = sum(hits["unseen"]) + sum(hits["clean"])
        found.append(
            {
                "table": "audit",
                "controls": controls,
                "count": rows[0]["controls"]["count"],
                "level": level,
                "effect": {kind: [sum(each), len(each)] for kind, each in hits.items()},
                "present": {kind: [sum(each), len(each)] for kind, each in lexical.items()},
                "false_discoveries": false,
                "discoveries": sum(hits["leaked"]) + false,
                "once": sum(hits["once"]),
                "null_p_below_0.05": float(
                    np.mean([(r["p"] or 1) < 0.05 for r in rows if kinds[r["item"]] in ("unseen", "clean")])
                ),
            }
        )
    return found


def write_tables(records: list[dict[str, Any]]) -> None:
    """Markdown on stderr."""

    def show(values: list[float], scale: float = 100, digits: int = 1) -> str:
        if not values:
            return "–"
        spread = f" ± {scale * np.std(values, ddof=1):.{digits}f}" if len(values) > 1 else ""
        return f"{scale * float(np.mean(values)):.{digits}f}{spread}"

    def table(title: str, head: list[str], rows: list[list[str]]) -> None:
        lines = [f"\n{title}\n", " | ".join(head), " | ".join("---" for _ in head), *map(" | ".join, rows)]
        print("\n".join(f"| {x} |" if " | " in x else x for x in lines), file=sys.stderr)

    rates = sorted({r["rate"] for r in records})
    of = {
        name: [r for r in records if r["table"] == name] for name in ("accuracy", "recall", "scores", "audit")
    }

    rows = []
    for model, rate in [("base", None), *(("model", rate) for rate in rates)]:
        cells = [f"{model}" if rate is None else f"r = {rate:g} %"]
        for kind in ("leaked", "clean", "once", "unseen"):
            ours = [
                r
                for r in of["accuracy"]
                if (r["model"], r["kind"]) == (model, kind) and rate in (None, r["rate"])
            ]
            cells.append(
                f"{show([r['loss'] for r in ours], 1, 2)}; {show([r['tokens'] for r in ours])}; "
                f"{show([r['answer'] for r in ours])}"
            )
        rows.append(cells)
    table(
        "Loss (nats); tokens right (%); answers right (%)",
        ["model", "leaked", "clean", "once", "unseen"],
        rows,
    )

    rows = []
    for method in dict.fromkeys(r["method"] for r in of["recall"]):
        cells = [method]
        for kind in ("leaked", "unseen"):
            for rate in [*rates, None] if kind == "leaked" else [None]:
                ours = [
                    r
                    for r in of["recall"]
                    if (r["method"], r["kind"]) == (method, kind) and rate in (None, r["rate"])
                ]
                if kind == "leaked" and rate == 0:
                    continue
                cells.append(
                    f"{show([r['recall'] for r in ours])}; any {show([r['any'] for r in ours], digits=0)}"
                )
        chance = np.mean([r["chance"] for r in of["recall"] if r["method"] == method])
        rows.append([*cells, f"{100 * chance:.2f}"])
    heads = [*(f"leaked, r = {rate:g} %" for rate in rates if rate), "leaked, all", "unseen, all", "chance"]
    table("Share of a problem's copies in the top bucket (%)", ["method", *heads], rows)

    rows = []
    for method in dict.fromkeys(r["method"] for r in of["scores"]):
        for kind in ("leaked", "unseen"):
            ours = [r for r in of["scores"] if (r["method"], r["kind"]) == (method, kind)]
            means = [show([r[key] for r in ours], 1, 1) for key in ("copies", "highest", "highest_other")]
            rows.append([method, kind, *means])
    head = ["method", "problems", "their copies", "highest", "highest but for copies"]
    table("Scores, in the mean size of a document's", head, rows)

    rows = []
    for controls in ("file", "absent", "made"):
        for rate in rates:
            ours = [r for r in of["audit"] if (r["controls"], r["rate"]) == (controls, rate)]
            if not ours:
                continue
            cells = [controls, f"{rate:g} %", str(len(ours))]
            for kind in ("leaked", "leaked, answered", "once", "unseen", "clean"):
                pairs = [r["effect"][kind] for r in ours if kind in r["effect"]]
                cells.append(f"{sum(a for a, _ in pairs)} of {sum(b for _, b in pairs)}")
            shares = [r["false_discoveries"] / max(1, r["discoveries"]) for r in ours]
            cells += [show(shares), show([r["null_p_below_0.05"] for r in ours])]
            rows.append(cells)
    head = ["controls", "r", "seeds", "leaked", "leaked, answered", "once", "unseen", "clean"]
    table("Verdicts at q < .05", [*head, "false discoveries (%)", "null items with p < .05 (%)"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("work", type=Path)
    parser.add_argument("--level", type=float, default=0.05)
    chosen = parser.parse_args()
    records = []
    for cell in sorted(chosen.work.glob("r*-s*")):
        kinds = {row["item"]: row["kind"] for row in read_rows(cell / "kinds.jsonl")}
        rate, seed = cell.name[1:].split("-s")
        said = Scored.read(cell)
        rows = accuracy_rows(cell, kinds)
        if said is not None:
            rows += [*recall_rows(said, kinds), *score_rows(said, kinds)]
        for row in (*rows, *audit_rows(cell, kinds, chosen.level)):
            records.append({"suite": "contamination", "rate": float(rate), "seed": int(seed)} | row)
    for record in records:
        print(json.dumps(record, ensure_ascii=False))
    write_tables(records)


if __name__ == "__main__":
    main()
