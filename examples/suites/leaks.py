"""Corpora with problems leaked in other words: the material of leaks.sh.

    python examples/suites/leaks.py gsm8k_train.jsonl.gz gsm8k_test.jsonl.gz \
        --filler instruct_gpteacher.jsonl.gz --out suite

Writes suite/base.jsonl, what the model is trained on first: problems of the training set and instructions.
Then a folder for each rate and seed, suite/r1.0-s0:

    corpus.jsonl      the pool that the model is fine-tuned on, of a fixed size: other problems of the
                      training set and other instructions in equal parts, `--copies` copies of each leaked one
    indexed.jsonl     the pool and, behind it, as many copies of as many problems `unseen`, in the same forms:
                      in the corpus that is audited, though the model was never trained on them
    benchmark.jsonl   problems of the test set, leaked, unseen, and others: most have no copy anywhere
    queries.jsonl     the leaked and the unseen ones, which all have a name to change
    kinds.jsonl       {item, kind, form, rule} of each

`form` says how copies differ from the problem (`leaks_rules`): "copy", "edit", "rewritten", and with
--held-back "held back", the two rules that no setting was chosen on. `r` is the number of leaked problems in
% of the documents of the pool.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from leaks_rules import FORMS, known_words, names_in
from planted import read_rows, write

from stride_cli.randomness import stream


def pair(row: dict[str, Any]) -> dict[str, Any]:
    return {key: row[key] for key in ("id", "prompt", "response")}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("train", type=Path, help="problems the model may know, JSON Lines, also .gz")
    parser.add_argument("test", type=Path, help="problems to leak")
    parser.add_argument("--filler", type=Path, required=True, help="instructions, {id, prompt, response}")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rates", type=float, nargs="+", default=[0.5, 1.0, 1.5], help="% of the pool")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--held-back", action="store_true", help="also the rules for the final measurement")
    parser.add_argument("--documents", type=int, default=1600, help="of the pool, copies included")
    parser.add_argument("--copies", type=int, default=20)
    parser.add_argument("--base", type=int, default=1500, help="problems, and instructions, before")
    parser.add_argument("--problems", type=int, help="of the benchmark; default: all that are short enough")
    parser.add_argument("--longest", type=int, default=500, help="characters of a pair")
    chosen = parser.parse_args()

    problems, test, filler = (
        [row for row in read_rows(path) if len(row["prompt"]) + len(row["response"]) <= chosen.longest]
        for path in (chosen.train, chosen.test, chosen.filler)
    )
    half = chosen.base + chosen.documents // 2
    most = 2 * round(chosen.documents * max(chosen.rates) / 100)
    words = known_words(row[key] for row in (*problems, *test) for key in ("prompt", "response"))
    named = sum(bool(names_in(row, words)) for row in test)
    if min(len(problems), len(filler)) < half or named <= most:
        parser.error(
            f"{len(problems)} problems to train on, {len(filler)} instructions and {named} problems with a "
            f"name to leak; needed: {half}, {half} and over {most}"
        )
    order = stream(0, "leaks base")
    problems, filler = (
        [pair(rows[int(i)]) for i in order.permutation(len(rows))] for rows in (problems, filler)
    )
    chosen.out.mkdir(parents=True, exist_ok=True)
    if not (chosen.out / "base.jsonl").exists():
        write(chosen.out / "base.jsonl", [*problems[: chosen.base], *filler[: chosen.base]])
    others = (problems[chosen.base :], filler[chosen.base :])
    for rate in chosen.rates:
        for seed in chosen.seeds:
            write_cell(chosen.out / f"r{rate:.1f}-s{seed}", (rate, seed), others, test, words, chosen)


def write_cell(
    folder: Path,
    cell: tuple[float, int],
    others: tuple[list[dict[str, Any]], list[dict[str, Any]]],
    test: list[dict[str, Any]],
    words: set[str],
    chosen: argparse.Namespace,
) -> None:
    """One corpus with its benchmark; left alone where it is whole."""
    if (folder / "kinds.jsonl").exists():
        return
    rate, seed = cell
    random = stream(seed, "leaks", round(rate * 10))
    forms = [form for form in FORMS if chosen.held_back or form != "held back"]
    size = round(chosen.documents * rate / 100)
    drawn = [test[int(i)] for i in random.permutation(len(test))[: chosen.problems]]
    named = [row for row in drawn if names_in(row, words)][: 2 * size]  # others have no name to change
    taken = {row["id"] for row in named}
    kinds = {
        "leaked": named[:size],
        "unseen": named[size:],
        "absent": [row for row in drawn if row["id"] not in taken],
    }
    planted: dict[str, list[dict[str, Any]]] = {"leaked": [], "unseen": []}
    said = []
    for kind, rows in kinds.items():
        for number, row in enumerate(rows):
            form = forms[number % len(forms)] if kind != "absent" else ""
            rules = FORMS.get(form, ())
            rule = rules[(number // len(forms) + seed) % len(rules)] if rules else None
            said.append(
                {"item": row["id"], "kind": kind, "form": form, "rule": getattr(rule, "__name__", "")}
            )
            if rule is not None:
                planted[kind] += copies(row, kind, rule, chosen.copies, random, words)
    more = chosen.documents - len(planted["leaked"])
    pool = [*planted["leaked"]]
    for rows, count in zip(others, (more - more // 2, more // 2), strict=True):
        pool += [rows[int(i)] for i in random.permutation(len(rows))[:count]]
    pool = [pool[int(i)] for i in random.permutation(len(pool))]
    folder.mkdir(exist_ok=True)
    write(folder / "corpus.jsonl", pool)
    write(folder / "indexed.jsonl", [*pool, *planted["unseen"]])
    write(folder / "benchmark.jsonl", [pair(row) for rows in kinds.values() for row in rows])
    write(folder / "queries.jsonl", [pair(row) for row in [*kinds["leaked"], *kinds["unseen"]]])
    write(folder / "kinds.jsonl", said)


def copies(
    row: dict[str, Any], kind: str, rule: Any, times: int, random: np.random.Generator, words: set[str]
) -> list[dict[str, Any]]:
    """So many draws of a rule."""
    texts = {"prompt": row["prompt"], "response": row["response"]}
    return [{"id": f"{kind}/{row['id']}/{n:03d}", **rule(texts, random, words)} for n in range(times)]


if __name__ == "__main__":
    main()
