"""What leaks.sh found: one record a cell and table on stdout, Markdown of all cells together on stderr.

    python examples/suites/leaks_tables.py suite r1.0-s0 r1.0-s1 > leaks.jsonl

- audit: of the problems of a kind and form, how many the audit looked at (present, or nearly), and how many
  it calls leaked at q < level. Trained are those whose copies were in the fine-tuning, untrained those whose
  copies are in the index alone; absent ones have no copy.
- search: the same for a search engine that flags what is more like its best document than 95 % of the
  absent ones, and how often a trained problem has the higher score of a trained and an untrained
  one (`trained_above`, AUROC; 0.5 is chance).
- power: what the audit would find with fewer absent problems as controls, by the loss alone and by what the
  fine-tuning took off it.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from planted import read_rows

from stride_cli.audit.calibration import benjamini_hochberg, p_values
from stride_cli.randomness import stream

CONTROLS, DRAWS = (25, 50, 100, 200, 400), 200
KINDS = {"leaked": "trained", "unseen": "untrained", "absent": "absent"}


def audit_rows(cell: Path, kinds: dict[str, dict[str, str]], level: float) -> list[dict[str, Any]]:
    """How each kind and form was judged."""
    rows = read_rows(cell / "audit.jsonl")
    found = []
    for kind, form in dict.fromkeys((each["kind"], each["form"]) for each in kinds.values()):
        ours = [
            row for row in rows if (kinds[row["item"]]["kind"], kinds[row["item"]]["form"]) == (kind, form)
        ]
        found.append(
            {
                "table": "audit",
                "kind": KINDS[kind],
                "form": form,
                "problems": len(ours),
                "tested": sum(bool(row["presence"]["found"]) for row in ours),
                "called_leaked": sum(row["verdict"] == "leaked and learnt" for row in ours),
                "effect": sum(row["q"] is not None and row["q"] < level for row in ours),
                "p_below_0.05": float(np.mean([(row["p"] or 1) < 0.05 for row in ours])),
                "loss": float(np.mean([row["effect"]["loss"] for row in ours])),
                "controls": max(row["controls"]["count"] for row in ours),
            }
        )
    return found


def search_rows(cell: Path, kinds: dict[str, dict[str, str]]) -> list[dict[str, Any]]:
    """What words, and embeddings, say of trained and untrained problems."""
    rows = read_rows(cell / "audit.jsonl")
    items = [row["item"] for row in rows]
    scores = {"words": np.array([row["presence"]["share"] for row in rows])}
    order = {row["id"]: number for number, row in enumerate(read_rows(cell / "benchmark.jsonl"))}
    for path in sorted(cell.glob("*.npy")):
        best = np.load(path, mmap_mode="r").max(axis=1)
        scores[path.stem] = best[[order[item] for item in items]]
    of = np.array([kinds[item]["kind"] for item in items])
    found = []
    for method, best in scores.items():
        line = float(np.quantile(best[of == "absent"], 0.95))
        trained, untrained = best[of == "leaked"], best[of == "unseen"]
        above = np.sign(trained[:, None] - untrained[None]).mean() / 2 + 0.5
        found.append(
            {
                "table": "search",
                "method": method,
                "trained": len(trained),
                "untrained": len(untrained),
                "trained_flagged": int((trained > line).sum()),
                "untrained_flagged": int((untrained > line).sum()),
                "trained_above": float(above),
            }
        )
    return found


def power_rows(cell: Path, kinds: dict[str, dict[str, str]], level: float) -> list[dict[str, Any]]:
    """What fewer controls would have found: so many of the absent problems, drawn again and again."""
    rows = read_rows(cell / "audit.jsonl")
    there = np.array([bool(row["presence"]["found"]) for row in rows])
    kind = np.array([kinds[row["item"]]["kind"] for row in rows])
    loss, base = (np.array([row["effect"][key] for row in rows], float) for key in ("loss", "base_loss"))
    found = []
    for name, knowledge in (("loss", -loss), ("loss before and after", np.log(base / loss))):
        for count in CONTROLS:
            if count > (~there).sum():
                continue
            random = stream(0, "leaks power", count)
            shares, false = [], []
            for _ in range(DRAWS):
                controls = knowledge[random.choice(np.flatnonzero(~there), count, replace=False)]
                p = p_values(knowledge[there], controls)
                hits, of = benjamini_hochberg(p) < level, kind[there]
                shares.append(hits[of == "leaked"].sum() / (kind == "leaked").sum())
                false.append(hits[of != "leaked"].sum() / max(1, hits.sum()))
            found.append(
                {
                    "table": "power",
                    "statistic": name,
                    "controls": count,
                    "draws": DRAWS,
                    "trained_found": float(np.mean(shares)),
                    "false_discovery_rate": float(np.mean(false)),
                    "nothing_found": float(np.mean(np.array(shares) == 0)),
                }
            )
    return found


def write_tables(records: list[dict[str, Any]]) -> None:
    """Markdown on stderr: counts over all cells."""

    def table(title: str, head: list[str], rows: list[list[str]]) -> None:
        print(f"\n{title}\n", file=sys.stderr)
        for cells in (head, ["---"] * len(head), *rows):
            print(f"| {' | '.join(cells)} |", file=sys.stderr)

    audit = [record for record in records if record["table"] == "audit"]
    forms = [form for form in dict.fromkeys(record["form"] for record in audit) if form]
    rows = []
    for rate in [*sorted({record["rate"] for record in records}), None]:
        cells = ["all" if rate is None else f"{rate:g} %"]
        for kind, form in [
            *(("trained", form) for form in [*forms, None]),
            *(("untrained", form) for form in [*forms, None]),
            ("absent", None),
        ]:
            ours = [
                record
                for record in audit
                if record["kind"] == kind
                and form in (None, record["form"])
                and rate in (None, record["rate"])
            ]
            cells.append(
                f"{sum(each['called_leaked'] for each in ours)} of {sum(each['problems'] for each in ours)}"
            )
        rows.append(cells)
    names = [*forms, "all"]
    head = ["r", *(f"{kind}, {form}" for kind in ("trained", "untrained") for form in names), "absent"]
    table("Called leaked at q < .05", head, rows)
    rows = []
    search = [record for record in records if record["table"] == "search"]
    for method in dict.fromkeys(record["method"] for record in search):
        ours = [record for record in search if record["method"] == method]
        flagged = (
            f"{sum(each[f'{kind}_flagged'] for each in ours)} of {sum(each[kind] for each in ours)}"
            for kind in ("trained", "untrained")
        )
        rows.append([method, *flagged, f"{np.mean([each['trained_above'] for each in ours]):.3f}"])
    table("Flagged by search", ["search", "trained", "untrained", "trained above untrained"], rows)
    rows = []
    power = [record for record in records if record["table"] == "power"]
    for key in dict.fromkeys((record["statistic"], record["controls"]) for record in power):
        ours = [record for record in power if (record["statistic"], record["controls"]) == key]
        means = (np.mean([each[name] for each in ours]) for name in ("trained_found", "false_discovery_rate"))
        rows.append([key[0], str(key[1]), *(f"{100 * mean:.1f}" for mean in means)])
    table(
        "With fewer controls", ["statistic", "controls", "trained found (%)", "false discoveries (%)"], rows
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("work", type=Path)
    parser.add_argument("cells", nargs="+")
    parser.add_argument("--level", type=float, default=0.05)
    chosen = parser.parse_args()
    records = []
    for name in chosen.cells:
        cell = chosen.work / name
        kinds = {row["item"]: row for row in read_rows(cell / "kinds.jsonl")}
        rate, seed = name[1:].split("-s")
        records += [
            {"suite": "leaks", "rate": float(rate), "seed": int(seed)} | row
            for row in (
                *audit_rows(cell, kinds, chosen.level),
                *search_rows(cell, kinds),
                *power_rows(cell, kinds, chosen.level),
            )
        ]
    for record in records:
        print(json.dumps(record, ensure_ascii=False))
    write_tables(records)


if __name__ == "__main__":
    main()
