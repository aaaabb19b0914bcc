"""A matrix of leaks and look-alikes for `stride audit`: the material of audit_matrix.sh, and its tables.

    python examples/suites/audit_matrix.py make gsm8k_train.jsonl.gz gsm8k_test.jsonl.gz --out suite
    python examples/suites/audit_matrix.py tables suite > audit_matrix.jsonl

`make` writes suite/base.jsonl, problems for a model to be fine-tuned, and a folder for each form of a corpus
(text, pairs, chats):

    corpus.jsonl      what the model is trained on: other problems, `--copies` copies of each learnt item,
                      and documents that only look like items
    indexed.jsonl     the same and, behind it, copies of items that the model was never trained on
    text.jsonl, pairs.jsonl, chats.jsonl      the benchmark, in three forms
    kinds.jsonl       {item, state, copy} of each

`state` is learnt, unseen (in the corpus, not trained on), look-alike or absent. `copy` says how the corpus
puts a learnt or unseen item, and what a look-alike shares with it:

- verbatim, upper, title, spaces (no-break), marks (quotes, bold, tags), forms (full-width), wrapped: the same
  words; question, answer: only that part; reworded: other people and things by `leaks_rules`
- instruction: the item begins as many documents do; template: a document has other names and numbers in its
  sentences; topic: a document asks the same in other words, and does not answer

A copy is known by heart where its loss is under half of that of unseen ones. `tables` prints one record for
each corpus, model, form of items, state and copy; and plain checkers of shared 8-grams and 13-grams of words,
at as many false positives.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from leaks_rules import known_words, listed, names, names_in, numerals, people, things, worded
from planted import Row, read_rows, write

from stride_cli.randomness import stream

CORPORA = ("text", "pairs", "chats")
Pair = dict[str, str]
INSTRUCTIONS = (
    "Solve the following problem of a school examination. Work step by step, write down every calculation, "
    "and give the result as a single number behind four hash signs.",
    "You are a careful teacher who helps children of the sixth grade with sums in words. Read it twice, find "
    "out what is asked, explain each step so that a child can follow, check the units, and do not skip any "
    "arithmetic, however simple it may look to you. Here is the problem:",
)
NO_ANSWER = "I would have to sit down with pencil and paper before I can say anything about that."
BARE = "Go on."


def _of_both(change: Callable[[str], str]) -> Callable[[Pair], Pair]:
    return lambda pair: {key: change(text) for key, text in pair.items()}


def _wide(text: str) -> str:
    return "".join(chr(ord(each) + 0xFEE0) if "!" <= each <= "~" else each for each in text)


def _marked(text: str) -> str:
    text = re.sub(
        r"(\d(?:[\d.,]*\d)?)", r"**\1**", text.replace("’", "'").replace('"', "”").replace("'", "’")
    )
    return "<p>" + text.replace(". ", ".</p> <p>") + "</p>"


SAME_WORDS: dict[str, Callable[[Pair], Pair]] = {
    "verbatim": dict,
    "upper": _of_both(str.upper),
    "title": _of_both(str.title),
    "spaces": _of_both(lambda text: text.replace(" ", "\u00a0")),
    "marks": _of_both(_marked),
    "forms": _of_both(_wide),
    "wrapped": _of_both(lambda text: textwrap.fill(text, 36)),
}
PARTS = ("question", "answer")
COPIES = (*SAME_WORDS, *PARTS, "reworded")
LOOK_ALIKES = ("instruction", "template", "topic")


def document(name: str, pair: Pair, corpus: str) -> dict[str, Any]:
    """A pair as a document of a corpus, or an item of a benchmark; one part may be empty."""
    prompt, response = pair["prompt"], pair["response"]
    if corpus == "text":
        return {"id": name, "text": " ".join(filter(None, (prompt, response)))}
    prompt, response = prompt or BARE, response or NO_ANSWER
    if corpus == "pairs":
        return {"id": name, "prompt": prompt, "response": response}
    turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]
    return {"id": name, "messages": turns}


def copied(pair: Pair, copy: str, draw: int, random: np.random.Generator, words: set[str]) -> Pair:
    """Draw a copy of an item, or a document that looks like it."""
    if copy in SAME_WORDS:
        return SAME_WORDS[copy](pair)
    if copy == "question":
        return {**pair, "response": ""}
    if copy == "answer":
        return {**pair, "prompt": ""}
    if copy == "reworded":
        return (names, numerals, listed, worded)[draw % 4](pair, random, words)
    if copy == "topic":
        return {**names(pair, random, words), "response": ""}
    other = things(people(pair, random, words), random)  # a template's names and numbers
    numbers: dict[str, str] = {}

    def another(match: re.Match[str]) -> str:
        old = match.group()
        while old not in numbers or numbers[old] == old:
            numbers[old] = str(random.integers(2, 10 ** len(old) + 9))
        return numbers[old]

    return {key: re.sub(r"\d+", another, text) for key, text in other.items()}


def make(chosen: argparse.Namespace) -> None:
    rows = [
        [
            {key: row[key] for key in ("id", "prompt", "response")}
            for row in read_rows(path)
            if len(row["prompt"]) + len(row["response"]) <= chosen.longest
        ]
        for path in (chosen.train, chosen.test)
    ]
    words = known_words(row[key] for each in rows for row in each for key in ("prompt", "response"))
    problems, test = rows
    # settings are chosen on other problems than those that are reported
    if chosen.develop:
        problems, test = problems[:-1400], problems[-1400:]
    problems = [problems[int(i)] for i in stream(0, "audit matrix base").permutation(len(problems))]
    chosen.out.mkdir(parents=True, exist_ok=True)
    base = [document(row["id"], row, "pairs") for row in problems[: chosen.base]]
    write(chosen.out / "base.jsonl", base)
    for number, corpus in enumerate(CORPORA):
        write_corpus(chosen.out / corpus, corpus, problems[chosen.base :], test, words, chosen, number)


def write_corpus(
    folder: Path,
    corpus: str,
    problems: list[dict[str, str]],
    test: list[dict[str, str]],
    words: set[str],
    chosen: argparse.Namespace,
    number: int,
) -> None:
    random = stream(number, "audit matrix")
    drawn = [test[int(i)] for i in random.permutation(len(test))]
    named = [row for row in drawn if len(names_in(row, words)) and len(re.findall(r"\d+", row["prompt"])) > 1]
    # a question in other words has other words
    reworded = [row for row in named if _changed(row["prompt"], names(row, random, words)["prompt"]) >= 4]
    free = iter([*reworded, *(row for row in named if row not in reworded)])
    items: list[tuple[dict[str, str], str, str]] = []
    for copy in reversed(LOOK_ALIKES):
        items += [(next(free), "look-alike", copy) for _ in range(chosen.alike)]
    for copy in COPIES:
        items += [(next(free), "learnt", copy) for _ in range(chosen.learnt)]
        items += [(next(free), "unseen", copy) for _ in range(chosen.unseen)]
    taken = {row["id"] for row, _, _ in items}
    absent = [row for row in drawn if row["id"] not in taken][: chosen.absent]
    items += [(row, "absent", "") for row in absent]
    pool: list[Row] = []
    behind: list[Row] = []
    benchmark = []
    others = iter(problems)
    for place, (row, state, copy) in enumerate(items):
        pair = {"prompt": row["prompt"], "response": row["response"]}
        if copy == "instruction":
            instruction = INSTRUCTIONS[place % 2] + " "
            pair["prompt"] = instruction + pair["prompt"]
            other = next(others)
            made = [{"prompt": instruction + other["prompt"], "response": other["response"]}]
        else:
            times = {"learnt": chosen.copies, "unseen": 2, "look-alike": 2, "absent": 0}[state]
            made = [copied(pair, copy, draw, random, words) for draw in range(times)]
        rows = [document(f"{state}/{copy}/{row['id']}/{n}", each, corpus) for n, each in enumerate(made)]
        (behind if state == "unseen" else pool).extend(rows)
        benchmark.append((row["id"], pair))
    pool += [document(row["id"], row, corpus) for row, _ in zip(others, range(chosen.others), strict=False)]
    pool = [pool[int(i)] for i in random.permutation(len(pool))]
    folder.mkdir(exist_ok=True)
    write(folder / "corpus.jsonl", pool)
    write(folder / "indexed.jsonl", [*pool, *behind])
    for form in CORPORA:
        write(folder / f"{form}.jsonl", [document(name, pair, form) for name, pair in benchmark])
    said = [{"item": row["id"], "state": state, "copy": copy} for row, state, copy in items]
    write(folder / "kinds.jsonl", said)


def _is(kind: dict[str, str], state: str, copy: str) -> bool:
    return (kind["state"], kind["copy"]) == (state, copy)


def _changed(before: str, after: str) -> int:
    return sum(old != new for old, new in zip(before.split(), after.split(), strict=False))


def plain_words(row: dict[str, Any]) -> list[str]:
    """Lower-cased words as checkers of n-grams take them: between white space, without punctuation."""
    text = (
        row.get("text")
        or " ".join(turn["content"] for turn in row.get("messages", []))
        or f"{row['prompt']} {row['response']}"
    )
    return [word for each in text.lower().split() if (word := each.strip(".,;:!?\"'()*<>"))]


def overlaps(corpus: list[dict[str, Any]], items: list[dict[str, Any]], n: int) -> np.ndarray:
    """Share of each item's n-grams of words that stand anywhere in the corpus."""

    def grams(row: dict[str, Any]) -> list[tuple[str, ...]]:
        words = plain_words(row)
        return [tuple(words[at : at + n]) for at in range(len(words) - n + 1)]

    known = {gram for row in corpus for gram in grams(row)}
    return np.array(
        [np.mean([gram in known for gram in own]) if (own := grams(row)) else 0.0 for row in items]
    )


def tables(chosen: argparse.Namespace) -> None:
    total: dict[tuple[str, ...], Counter[str]] = {}
    for corpus in CORPORA:
        folder = chosen.out / corpus
        if not any(folder.glob("*-audits/audit-*.jsonl")):
            continue
        kinds = read_rows(folder / "kinds.jsonl")
        indexed, benchmark = read_rows(folder / "indexed.jsonl"), read_rows(folder / "pairs.jsonl")
        shares = {f"{n}-grams": overlaps(indexed, benchmark, n) for n in (8, 13)}
        for path in sorted(folder.glob("*-audits/audit-*.jsonl")):
            form, controls = path.stem.split("-")[1:3]
            model = path.parent.name.removesuffix("-audits")
            rows = {row["item"]: row for row in read_rows(path)}
            # loss of copies that the model was not trained on
            strange = {
                copy: float(
                    np.mean([rows[e["item"]]["effect"]["loss"] for e in kinds if _is(e, "unseen", copy)])
                )
                for copy in COPIES
            }
            for each in kinds:
                row = rows[each["item"]]
                cell = (corpus, model, controls, form, each["state"], each["copy"])
                count = total.setdefault(cell, Counter())
                count["items"] += 1
                count["found"] += bool(row["presence"]["found"])
                count[row["verdict"]] += 1
                count["by heart"] += (heart := row["effect"]["loss"] < 0.5 * strange.get(each["copy"], 0.0))
                count["by heart, leaked"] += heart and row["verdict"] == "leaked and learnt"
        # the checkers flag what shares more than `allowed` look-alikes and absent items do
        false = np.array([each["state"] in ("look-alike", "absent") for each in kinds])
        for name, share in shares.items():
            for allowed in (0.0, 0.02):
                line = float(np.quantile(share[false], 1 - allowed))
                for each, flagged in zip(kinds, share > line, strict=True):
                    place = (corpus, f"{name}:{allowed:g}", "", "pairs", each["state"], each["copy"])
                    count = total.setdefault(place, Counter())
                    count["items"] += 1
                    count["found"] += bool(flagged)
    for key, count in total.items():
        labels = dict(zip(("corpus", "model", "controls", "form", "state", "copy"), key, strict=True))
        sys.stdout.write(json.dumps({"table": "matrix", **labels, **count}) + "\n")
    markdown(total)


def markdown(total: dict[tuple[str, ...], Counter[str]]) -> None:
    """All corpora and forms together, on stderr."""
    merged: dict[tuple[str, str, str, str], Counter[str]] = {}
    for (_, model, controls, _, state, copy), count in total.items():
        merged.setdefault((model, controls, state, copy), Counter()).update(count)
    verdicts = ("leaked and learnt", "present, no effect", "undecided", "no evidence")
    said = ("found", *verdicts, "by heart", "by heart, leaked")
    sys.stderr.write(f"| model | controls | state | copy | items | {' | '.join(said)} |\n")
    sys.stderr.write("|---|---|---|---|--:|" + "--:|" * len(said) + "\n")
    for cell, count in merged.items():
        values = [count["items"], *(count[each] for each in said)]
        sys.stderr.write(f"| {' | '.join([*cell, *map(str, values)])} |\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(required=True)
    making = commands.add_parser("make")
    making.set_defaults(run=make)
    making.add_argument("train", type=Path, help="problems the model may know, JSON Lines, also .gz")
    making.add_argument("test", type=Path, help="problems of the benchmark")
    making.add_argument("--out", type=Path, required=True)
    making.add_argument("--develop", action="store_true", help="items from the end of the training problems")
    making.add_argument("--base", type=int, default=1500, help="problems of the model to be fine-tuned")
    making.add_argument("--copies", type=int, default=8, help="of a learnt item")
    making.add_argument("--learnt", type=int, default=6, help="items of each copy")
    making.add_argument("--unseen", type=int, default=3, help="items of each copy")
    making.add_argument("--alike", type=int, default=50, help="items of each look-alike")
    making.add_argument("--absent", type=int, default=120)
    making.add_argument("--others", type=int, default=300, help="documents beside")
    making.add_argument("--longest", type=int, default=500, help="characters of a pair")
    telling = commands.add_parser("tables")
    telling.set_defaults(run=tables)
    telling.add_argument("out", type=Path)
    chosen = parser.parse_args()
    chosen.run(chosen)


if __name__ == "__main__":
    main()
