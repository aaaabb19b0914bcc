"""Check signs by retraining: what documents shown as supporting or opposing do to a loss once left out.

    python examples/suites/signs.py instruct.jsonl.gz --base BASE --out WORK > signs.json

BASE (a small one, made by `stride model train`, or a directory, hub id or .gguf file) is fine-tuned for 2
epochs on 150 pairs of one template; 10 others are queries. For each query the 40 documents that support most,
or oppose most, and whose influence is above the null prompts' line in size, are left out, and as many random
others are repeated: the number of steps is the same. So it is for 40 random documents. Three seeds each.
Writes one JSON object: rises of the loss, nats per scored token, means over queries and standard errors.
"""

from __future__ import annotations

import argparse
import gzip
import json
import subprocess
import sys
from pathlib import Path

import numpy as np

from index_format.reader import Index
from stride_cli.api import QueryOptions, Session
from stride_cli.data.query_set import QuerySet
from stride_cli.data.workspace import Workspace, open_model
from stride_cli.randomness import stream
from stride_cli.training.jobs import Job
from stride_cli.training.retraining import open_trainer, retrain, store_of

PAIRS, QUERIES, MOST = 150, 10, 40
FEWEST = 10  # documents of a sign: of fewer a query says nothing on it


def stride(*words: str | Path) -> None:
    subprocess.run([sys.executable, "-m", "stride_cli", *map(str, words)], check=True, stdout=sys.stderr)


def made(out: Path, name: str, rows: list[dict[str, str]], base: str, epochs: int, *, fit: bool) -> Path:
    """Fine-tune a model on pairs and index them; with a fit, for queries and verdicts."""
    corpus, model, index = out / f"{name}.jsonl", out / f"{name}.model", out / f"{name}.stride"
    if not corpus.exists():
        corpus.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    if not model.exists():
        stride("model", "finetune", corpus, "--model", base, "--out", model, "--epochs", str(epochs))
    if not index.exists():
        stride("index", "build", corpus, "--model", model, "--out", index)
    if fit and not (index / "operators").exists():
        stride("train", "--index", index)
    return index


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("pairs", type=Path)
    parser.add_argument("--base", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--begins", default="toolformer", help="of the ids of the pairs of one template")
    parser.add_argument("--longest", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=2)
    chosen = parser.parse_args()
    chosen.out.mkdir(parents=True, exist_ok=True)
    # 1. 150 pairs of one template, and 10 others
    rows = [json.loads(line) for line in gzip.decompress(chosen.pairs.read_bytes()).splitlines()]
    short = [
        {key: row[key] for key in ("id", "prompt", "response")}
        for row in rows
        if row["id"].startswith(chosen.begins) and len(row["prompt"] + row["response"]) <= chosen.longest
    ]
    order = stream(11, "signs").permutation(len(short))[: PAIRS + QUERIES]
    corpus, queries = [short[i] for i in order[:PAIRS]], [short[i] for i in order[PAIRS:]]
    index = made(chosen.out, "pairs", corpus, chosen.base, chosen.epochs, fit=True)
    # 2. What is shown of each query
    session = Session.open(index)
    options = QueryOptions(top=PAIRS, bottom=PAIRS, passages="none")
    answers = [session.query(row["prompt"], options, response=row["response"]) for row in queries]
    asked = QuerySet.from_queries([answer.query for answer in answers])
    documents = {name: number for number, name in enumerate(row["id"] for row in corpus)}
    shown: list[dict[str, np.ndarray]] = []
    for answer in answers:
        line = answer.line or 0.0
        sets = {
            sign: np.array(
                [
                    documents[answer.document_ids[hit.document]]
                    for hit in hits
                    if abs(hit.influence) > line and not hit.backfilled
                ][:MOST],
                np.int64,
            )
            for sign, hits in (("supports", answer.supporters), ("opposes", answer.opposers))
        }
        shown.append(sets)
    # 3. Trainings: each document twice in an index, so that some may be repeated
    twice = [*corpus, *({**row, "id": f"{row['id']} again"} for row in corpus)]
    double = made(chosen.out, "twice", twice, chosen.base, chosen.epochs, fit=False)
    workspace = Workspace.open(Index.open(double), open_model(Index.open(double)))
    assert session.index.n_chunks == PAIRS and workspace.n_chunks == 2 * PAIRS
    trainer, store = open_trainer(workspace, asked), store_of(workspace.index)
    random = stream(12, "signs")
    full = np.arange(2 * PAIRS) < PAIRS
    jobs: dict[tuple[int, str], np.ndarray] = {(-1, "full"): full}
    for query, sets in enumerate(shown):
        for sign, own in [*sets.items(), ("random", random.permutation(PAIRS)[:MOST])]:
            if len(own) < FEWEST:
                continue
            mask = full.copy()
            mask[own] = False
            others = np.setdiff1d(np.arange(PAIRS), own)
            mask[PAIRS + random.permutation(others)[: len(own)]] = True
            jobs[query, sign] = mask
    seeds = range(100, 100 + chosen.seeds)
    outcomes = retrain(trainer, [Job(mask, seed) for mask in jobs.values() for seed in seeds], store=store)
    losses = np.stack([each.losses for each in outcomes]).reshape(len(jobs), chosen.seeds, -1).mean(axis=1)
    whole = losses[0]
    rises: dict[str, list[float]] = {"supports": [], "opposes": [], "random": []}
    for (query, sign), found in zip(list(jobs)[1:], losses[1:], strict=True):
        rises[sign].append(float(found[query] - whole[query]))
    record = {
        "suite": "signs",
        "pairs": PAIRS,
        "queries": QUERIES,
        "seeds": chosen.seeds,
        "loss": float(whole.mean()),
        "shown": {
            sign: float(np.mean([len(sets[sign]) for sets in shown])) for sign in ("supports", "opposes")
        },
        "opposing_share": float(
            np.mean([len(a.opposers) / (len(a.opposers) + len(a.supporters)) for a in answers])
        ),
        "rise": {
            sign: {
                "queries": len(found),
                "mean": float(np.mean(found)) if found else None,
                "se": float(np.std(found, ddof=1) / np.sqrt(len(found))) if len(found) > 1 else None,
            }
            for sign, found in rises.items()
        },
    }
    print(json.dumps(record))


if __name__ == "__main__":
    main()
