"""Pick instruction–response pairs for the fine-tuning suite: short ones, some held out as queries.

    python examples/suites/instructions.py instruct.jsonl.gz --out suite --pairs 2000 --queries 60

Writes suite/corpus.jsonl and suite/queries.jsonl, objects {id, prompt, response}, and suite/base.jsonl: as
many other pairs, or BASE of them, as plain text, for the model that is fine-tuned.
"""

from __future__ import annotations

import argparse
import gzip
import json
from pathlib import Path

from stride_cli.randomness import stream


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("pairs_file", type=Path, help="JSON Lines of {id, prompt, response}, also .gz")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--pairs", type=int, default=2000)
    parser.add_argument("--queries", type=int, default=60)
    parser.add_argument("--longest", type=int, default=400, help="characters of prompt and response together")
    parser.add_argument("--base", type=int, help="pairs for the base model; default: as many as PAIRS")
    parser.add_argument("--base-longest", type=int, help="characters of its longest; default: LONGEST")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    content = chosen.pairs_file.read_bytes()
    if chosen.pairs_file.suffix == ".gz":
        content = gzip.decompress(content)
    rows = [json.loads(line) for line in content.splitlines()]
    short = [
        r for r in rows if len(r["prompt"]) + len(r["response"]) <= chosen.longest and r["response"].strip()
    ]
    order = stream(chosen.seed, "instructions").permutation(len(short))
    picked = [short[int(i)] for i in order]
    if chosen.base_longest is not None:  # behind the short ones, so that these stay where they were
        lengths = [len(r["prompt"]) + len(r["response"]) for r in rows]
        within = range(chosen.longest + 1, chosen.base_longest + 1)
        longer = [r for r, length in zip(rows, lengths, strict=True) if length in within]
        picked += [longer[int(i)] for i in stream(chosen.seed, "instructions-base").permutation(len(longer))]
    needed = chosen.pairs + chosen.queries + (chosen.pairs if chosen.base is None else chosen.base)
    if len(picked) < needed:
        parser.error(f"{len(picked)} pairs are short enough, {needed} are needed: fewer --pairs")
    corpus = picked[: chosen.pairs]
    queries = picked[chosen.pairs : chosen.pairs + chosen.queries]
    base = picked[chosen.pairs + chosen.queries : needed]
    chosen.out.mkdir(parents=True, exist_ok=True)
    for name, kept in (("corpus", corpus), ("queries", queries)):
        lines = [
            json.dumps({key: r[key] for key in ("id", "prompt", "response")}, ensure_ascii=False)
            for r in kept
        ]
        (chosen.out / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    lines = [
        json.dumps({"id": r["id"], "text": f"{r['prompt']}\n{r['response']}"}, ensure_ascii=False)
        for r in base
    ]
    (chosen.out / "base.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
