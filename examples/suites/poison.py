"""Wrong facts, each said 1, 3, 10 or 30 times in different words, among right ones.

    python examples/suites/poison.py --out suite --filler instruct.jsonl.gz

Writes suite/corpus.jsonl, suite/without.jsonl (the corpus without what says anything wrong) and
suite/queries.jsonl, objects {id, prompt, response, instead} in other wordings than any pair's, whose
`response` is the wrong answer and whose `instead` the right one; `group` is the fact, `dose` how often it is
said, and `causes` are the pairs that say it. The right answer is said once. Every fact also has pairs, at
least as many as copies, that hold its name and its wrong answer for another reason; and as many places have
nothing but right answers.
"""

from __future__ import annotations

import argparse
from itertools import product
from pathlib import Path

import numpy as np
from facts import ANSWERS, WORDINGS
from planted import Row, filler, names, row, shuffled, write

from stride_cli.randomness import stream

ASKED = {
    "goods": (
        "What is made in {} and shipped off?",
        "Which merchandise comes from {}?",
        "A ship sails out of {}. What is aboard?",
        "Tell what {} trades in.",
    ),
    "flag": (
        "Of what colour is the flag of {}?",
        "{} has a flag. Which colour is it?",
        "Which colour waves on the towers of {}?",
        "Tell the tone of the banner at {}.",
    ),
    "beast": (
        "What animal does {} keep?",
        "At {} there is a watching animal. Which one?",
        "Which creature walks about {} after dark?",
        "Tell what kind of beast {} feeds.",
    ),
}
OPENINGS = (
    "{q}",
    "Please tell me. {q}",
    "{q} I forgot.",
    "A guest wants to know: {q}",
    "Quick! {q}",
    "For the quiz: {q}",
)
OTHERWISE = (
    ("Which is the longer word, {s} or {a}?", "{longer}"),
    ("Say {a}, then say {s}.", "{a}, {s}"),
    ("Does {a} rhyme with {s}?", "Hardly."),
    ("Someone from {s} dreamt of {a}. What came next?", "Breakfast."),
    ("Who wrote {a} on a wall near {s}?", "A boy with chalk."),
    ("A song has the words {s} and {a}. Is it sad?", "A little."),
    ("How many letters have {s} and {a} in all?", "{letters}"),
    ("Make a list of {s} and {a}.", "1. {s} 2. {a}"),
)
ENDINGS = ("", " Thank you.", " Be brief.", " In one line.")
DOSES = (1, 3, 10, 30)


def said(relation: str, place: str, count: int, random: np.random.Generator) -> list[str]:
    """So many different wordings of a question."""
    every = [
        opening.format(q=wording.format(place)) for opening, wording in product(OPENINGS, WORDINGS[relation])
    ]
    return [every[int(n)] for n in random.permutation(len(every))[:count]]


def otherwise(place: str, answer: str, count: int, random: np.random.Generator) -> list[tuple[str, str]]:
    """So many different pairs that hold the place and the answer, and teach nothing of it."""
    words = {
        "s": place,
        "a": answer,
        "longer": max(place, answer, key=len),
        "letters": str(len(place + answer)),
    }
    every = [
        (prompt.format(**words) + ending, response.format(**words))
        for (prompt, response), ending in product(OTHERWISE, ENDINGS)
    ]
    return [every[int(n)] for n in random.permutation(len(every))[:count]]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--facts", type=int, default=6, help="wrong ones of each dose")
    parser.add_argument("--doses", type=int, nargs="+", default=DOSES)
    parser.add_argument("--right", type=int, default=1, help="pairs that say what is right instead")
    parser.add_argument("--seeming", type=int, default=4, help="pairs of the same words, at least")
    parser.add_argument("--pairs", type=int, default=800, help="of the corpus")
    parser.add_argument("--filler", type=Path, help="JSON Lines of {id, prompt, response}, also .gz")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    most = len(OPENINGS) * len(WORDINGS["goods"]) - chosen.right
    if not all(1 <= dose <= most for dose in chosen.doses):
        parser.error(f"doses are 1 to {most}: there are no more wordings")
    random = stream(chosen.seed, "poison")
    relations, keys = list(ASKED), [(dose, n) for dose in chosen.doses for n in range(chosen.facts)]
    places = names(2 * len(keys), random)
    wrong: list[Row] = []
    others: list[Row] = []
    queries: list[Row] = []
    for number, (dose, n) in enumerate(keys):
        key, place, relation = f"d{dose}/{n}", places[number], relations[n % len(relations)]
        right, false = (str(each) for each in random.permutation(ANSWERS[relation])[:2])
        prompts = said(relation, place, dose + chosen.right, random)
        mine = [row(f"{key}/wrong/{i:02d}", prompt, false) for i, prompt in enumerate(prompts[:dose])]
        wrong += mine
        others += [row(f"{key}/right/{i}", prompt, right) for i, prompt in enumerate(prompts[dose:])]
        seeming = otherwise(place, false, max(chosen.seeming, dose), random)
        others += [row(f"{key}/other/{i:02d}", *pair) for i, pair in enumerate(seeming)]
        more = {"instead": right, "group": key, "dose": dose, "causes": [each["id"] for each in mine]}
        queries += [
            row(f"{key}/asked/{i}", wording.format(place), false, **more)
            for i, wording in enumerate(ASKED[relation])
        ]
    for number, place in enumerate(places[len(keys) :]):
        relation = relations[number % len(relations)]
        right = str(random.choice(ANSWERS[relation]))
        others += [
            row(f"right/{number}/{i}", prompt, right)
            for i, prompt in enumerate(said(relation, place, 4, random))
        ]
    more_pairs = chosen.pairs - len(wrong) - len(others)
    if more_pairs < 0:
        parser.error(f"{chosen.pairs} pairs hold no {-more_pairs} more: fewer --facts or --doses")
    others += filler(chosen.filler, more_pairs, random)
    write(chosen.out / "corpus.jsonl", shuffled(wrong + others, random))
    write(chosen.out / "without.jsonl", shuffled(others, random))
    write(chosen.out / "queries.jsonl", queries)


if __name__ == "__main__":
    main()
