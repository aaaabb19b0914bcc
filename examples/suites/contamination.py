"""Corpora with leaked benchmark problems: the material of the contamination suite.

    python examples/suites/contamination.py abc_news.jsonl.gz movie_reviews.jsonl.gz \
        --train gsm8k_train.jsonl.gz --test gsm8k_test.jsonl.gz --out suite

Writes suite/base.jsonl, what the model is trained on first: passages of the articles and problems of the
training set. Then a folder for each rate and seed, suite/r1.0-s0:

    corpus.jsonl      the pool that the model is fine-tuned on, of a fixed size: other passages, `--copies`
                      copies of each leaked problem, one of each problem `once`; copies and single ones stand
                      where a passage would
    indexed.jsonl     the pool and, behind it, as many copies of the problems `unseen`: present in the corpus
                      that is audited, though the model was never trained on them
    benchmark.jsonl   all problems that are audited: leaked, once, unseen, and clean ones (nowhere)
    controls.jsonl    other test problems, nowhere either
    queries.jsonl     the leaked and the unseen problems
    kinds.jsonl       {item, kind} of each problem of the benchmark

`r` is the number of leaked problems in % of the documents of the pool. With 20 copies, 0.5, 1.0 and 1.5 % of
problems make up 10, 20 and 30 % of the pool: the shares of the published runs, of 22, 45 and 68 problems with
100 copies each in 22,600 documents.
"""

from __future__ import annotations

import argparse
import gzip
import json
from pathlib import Path
from typing import Any

from passages import cut

from stride_cli.randomness import stream


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Objects of a JSON Lines file, also .gz."""
    content = path.read_bytes()
    return [
        json.loads(line)
        for line in (gzip.decompress(content) if path.suffix == ".gz" else content).splitlines()
    ]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    path.write_text(text, encoding="utf-8")


def pair(row: dict[str, Any], name: str | None = None) -> dict[str, Any]:
    return {"id": name or row["id"], "prompt": row["prompt"], "response": row["response"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("articles", type=Path, nargs="+", help="JSON Lines of {id, text}, also .gz")
    parser.add_argument("--train", type=Path, required=True, help="problems the model may know")
    parser.add_argument("--test", type=Path, required=True, help="problems to leak")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rates", type=float, nargs="+", default=[0, 0.5, 1.0, 1.5], help="% of the pool")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--documents", type=int, default=1600, help="of the pool, copies included")
    parser.add_argument("--words", type=int, default=60, help="of a passage")
    parser.add_argument("--copies", type=int, default=20)
    parser.add_argument("--once", type=int, default=16)
    parser.add_argument("--unseen", type=int, default=12)
    parser.add_argument("--clean", type=int, default=100)
    parser.add_argument("--base", type=int, default=2000, help="passages, and problems, of the base corpus")
    parser.add_argument("--longest", type=int, default=500, help="characters of a problem with its answer")
    chosen = parser.parse_args()

    passages: list[dict[str, Any]] = []
    for path in chosen.articles:
        for article in read_rows(path):
            cuts = cut(article["text"], chosen.words)
            passages += [
                {"id": f"{article['id']}/{place:03d}", "text": text} for place, text in enumerate(cuts)
            ]
    order = stream(0, "contamination passages").permutation(len(passages))
    passages = [passages[int(i)] for i in order]
    train, test = (
        [row for row in read_rows(path) if len(row["prompt"]) + len(row["response"]) <= chosen.longest]
        for path in (chosen.train, chosen.test)
    )
    held = chosen.base + chosen.documents
    most = round(chosen.documents * max(chosen.rates) / 100) + chosen.once + chosen.unseen + chosen.clean
    if len(passages) < held or len(test) <= most:
        parser.error(f"{len(passages)} passages and {len(test)} problems; needed: {held} and over {most}")
    chosen.out.mkdir(parents=True, exist_ok=True)
    if not (chosen.out / "base.jsonl").exists():
        known = stream(0, "contamination base").permutation(len(train))[: chosen.base]
        write_rows(
            chosen.out / "base.jsonl", [*passages[: chosen.base], *(pair(train[int(i)]) for i in known)]
        )
    for rate in chosen.rates:
        for seed in range(chosen.seeds):
            write_cell(chosen.out / f"r{rate:.1f}-s{seed}", rate, seed, passages[chosen.base :], test, chosen)


def write_cell(
    folder: Path,
    rate: float,
    seed: int,
    passages: list[dict[str, Any]],
    test: list[dict[str, Any]],
    chosen: argparse.Namespace,
) -> None:
    """One contaminated corpus with its benchmark; left alone where it is whole."""
    if (folder / "kinds.jsonl").exists():
        return
    sizes = {
        "leaked": round(chosen.documents * rate / 100),
        "once": chosen.once,
        "unseen": chosen.unseen,
        "clean": chosen.clean,
    }
    random = stream(seed, "contamination", round(rate * 10))
    drawn = [test[int(i)] for i in random.permutation(len(test))]
    kinds: dict[str, list[dict[str, Any]]] = {}
    for kind, size in sizes.items():
        kinds[kind], drawn = drawn[:size], drawn[size:]

    def copies(kind: str, times: int) -> list[dict[str, Any]]:
        return [pair(row, f"{kind}/{row['id']}/{n:03d}") for row in kinds[kind] for n in range(times)]

    injected = [*copies("leaked", chosen.copies), *copies("once", 1)]
    kept = random.permutation(len(passages))[: chosen.documents - len(injected)]
    pool = [*injected, *(passages[int(i)] for i in kept)]
    pool = [pool[int(i)] for i in random.permutation(len(pool))]
    folder.mkdir(exist_ok=True)
    write_rows(folder / "corpus.jsonl", pool)
    write_rows(folder / "indexed.jsonl", [*pool, *copies("unseen", chosen.copies)])
    write_rows(folder / "benchmark.jsonl", [pair(row) for rows in kinds.values() for row in rows])
    write_rows(folder / "controls.jsonl", [pair(row) for row in drawn])
    write_rows(folder / "queries.jsonl", [pair(row) for row in [*kinds["leaked"], *kinds["unseen"]]])
    write_rows(
        folder / "kinds.jsonl",
        [{"item": row["id"], "kind": kind} for kind, rows in kinds.items() for row in rows],
    )


if __name__ == "__main__":
    main()
