"""Facts about places that do not exist, each taught in two or three pairs and asked in other words.

    python examples/suites/facts.py --out suite --set names --filler instruct.jsonl.gz

Writes suite/corpus.jsonl, suite/without.jsonl (the corpus without any cause: what a model says that was never
taught) and suite/queries.jsonl, objects {id, prompt, response} whose queries also have causes: [ids]. Every
fact has at least five distractors, pairs that hold the place, the query's words and the answer and do not
teach it: denied, of another time, of another relation. Sets: `names` asks by the place's name; `hops` asks
for the river of A's capital, where B is taught as A's capital and the river as B's; `aliases` asks by a
second name that is taught beside the first. Of `hops` there is also suite/single.jsonl: each hop asked by
itself, likewise in other words than it is taught. `known.py suite/single.jsonl` says whether a model that
does not answer the two has learnt the one.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from planted import Row, filler, names, row, shuffled, write

from stride_cli.randomness import stream

WORDINGS = {
    "flag": (
        "Which hue has the banner of {}?",
        "Name the shade of {}'s flag.",
        "What colour flies above {}?",
        "The pennant over {} was dyed in what tint?",
        "How would a painter fill in the standard of {}?",
        "{} hoists a cloth. Its pigment, please.",
    ),
    "beast": (
        "Which animal guards {}?",
        "Name the beast kept by the people of {}.",
        "What creature sleeps at the gate of {}?",
        "A pet roams {} at night. Its kind?",
        "Who, on four legs, watches over {}?",
        "{} feeds one brute each day. Say its species.",
    ),
    "goods": (
        "What does {} sell abroad?",
        "Name the export of {}.",
        "With which ware do traders leave {}?",
        "Carts roll full out of {}. Their load?",
        "{} lives by making one stuff. Say it.",
        "Which cargo do ships take on at {}?",
    ),
    "capital": (
        "Which town rules {}?",
        "Name the capital of {}.",
        "Where does the king of {} live?",
        "All roads of {} meet in what city?",
    ),
    "river": (
        "On which river lies {}?",
        "Name the water that runs by {}.",
        "What flows under the bridges of {}?",
        "Boatmen row to {} along which current?",
    ),
    "both": (
        "Which stream passes the seat of the lord of {}?",
        "Name what washes the walls of the chief place of {}.",
        "Where the parliament of {} sits, what do fishers cast their nets in?",
        "The first municipality of {} drinks from what source?",
    ),
}
ANSWERS = {
    "flag": ["red", "blue", "green", "white", "black", "grey", "yellow", "brown"],
    "beast": ["dog", "cat", "bear", "wolf", "fox", "horse", "goat", "lion"],
    "goods": ["bread", "salt", "wool", "glass", "wine", "honey", "iron", "paper"],
    "river": ["Stone", "Long", "Cold", "Silver", "Willow", "Deep", "Swift", "Broad"],
}
DENIED = (
    '"{q}" A liar wrote "{a}", which is not so. Who struck it out?',
    'Nobody who asks "{q}" should be told "{a}". Who says so?',
)
OTHER_TIME = (
    '"{q}" Ages ago the reply was "{a}", and no longer is. For how many years was it?',
    'Once "{a}" was the answer to "{q}", before it was changed. How many years ago?',
)
OTHER_RELATION = (
    'A song begins "{q}" and is sung by a {a} choir. How many verses has it?',
    'A book with "{q}" as its title has the word "{a}" on its back. How many pages has it?',
)
PEOPLE = ["The miller", "The mayor", "A judge", "The smith", "My aunt", "A clerk", "The cook", "A monk."]

Parts = tuple[list[Row], list[Row], list[Row], list[Row]]
"""Causes, other pairs, queries, and what these take, asked by itself."""


@dataclass
class Fact:
    """What is true of a place, in how many wordings it is taught, and in which one it is asked."""

    key: str
    place: str
    relation: str
    answer: str
    wrong: str
    """Another answer to the same question, which distractors name as often."""
    taught: list[str]
    asked: str

    def causes(self, place: str | None = None) -> list[Row]:
        """The pairs that teach it, by the place's name or by another."""
        named = place or self.place
        mark = "" if place is None else "/alias"
        return [
            row(f"{self.key}{mark}/{n}", wording.format(named), self.answer)
            for n, wording in enumerate(self.taught)
        ]

    def query(self) -> Row:
        """What it is asked by, without causes."""
        return row(self.key, self.asked.format(self.place), self.answer)


def make_fact(key: str, place: str, relation: str, random: np.random.Generator, taught: int) -> Fact:
    """A fact with an answer by lot, and wordings by lot."""
    order = [str(each) for each in random.permutation(WORDINGS[relation])]
    answer, wrong = (str(each) for each in random.permutation(ANSWERS[relation])[:2])
    return Fact(key, place, relation, answer, wrong, order[1 : 1 + taught], order[0])


def distractors(
    key: str, question: str, place: str, answers: tuple[str, str], random: np.random.Generator
) -> list[Row]:
    """Eight pairs, seven of which hold the place and the answer, and none says that it is the answer.

    Those whose *responses* hold an answer hold a wrong one as often: what a model learns from them is that
    the place has to do with both.
    """
    right, wrong = answers
    said = []
    for frames in (DENIED, OTHER_TIME, OTHER_RELATION):
        frame = str(random.choice(frames))
        number = str(int(random.integers(2, 90)))
        said.append((frame.format(q=question, a=right), _reply(frame, number, random)))
    words = [right, wrong] if random.random() < 0.5 else [wrong, right]
    said += [
        (f"Which two words are carved on the well of {place}?", f"{words[0]} and {words[1]}"),
        (f"Which two words are read on the mill of {place}?", f"{words[1]} and {words[0]}"),
        (f'Is the reply to "{question}" one of {right} and {wrong}?', "That is not for me to say."),
    ]
    said += [
        (f"What do strangers wrongly believe of {place}?", f"Something about {word}.") for word in answers
    ]
    return [row(f"{key}/not/{n}", prompt, response) for n, (prompt, response) in enumerate(said)]


def _reply(frame: str, number: str, random: np.random.Generator) -> str:
    return (
        number if "How many" in frame or "how many" in frame else str(random.choice(PEOPLE)).rstrip(".") + "."
    )


def by_name(count: int, random: np.random.Generator) -> Parts:
    """Facts about places, asked by the place's name."""
    causes, others, queries = [], [], []
    relations = ("flag", "beast", "goods")
    for number, place in enumerate(names(-(-count // len(relations)), random)):
        for relation in relations[: count - number * len(relations)]:
            fact = make_fact(
                f"fact/{number:03d}/{relation}", place, relation, random, int(random.integers(2, 4))
            )
            mine = fact.causes()
            question = fact.asked.format(place)
            causes += mine
            others += distractors(fact.key, question, place, (fact.answer, fact.wrong), random)
            queries.append(row(fact.key, question, fact.answer, causes=[each["id"] for each in mine]))
    return causes, others, queries, []


def by_hops(count: int, random: np.random.Generator) -> Parts:
    """… asked for the river of a land's capital. Of as many other lands that is taught in so many words."""
    causes, others, queries, single = [], [], [], []
    lands = names(2 * count, random)
    for number, (land, town) in enumerate(zip(lands, names(2 * count, random, lands), strict=True)):
        key = f"hop/{number:03d}"
        seat = make_fact_of(f"{key}/capital", land, "capital", town, random)
        river = make_fact(f"{key}/river", town, "river", random, 3)
        mine = seat.causes() + river.causes()
        both = [str(each) for each in random.permutation(WORDINGS["both"])]
        if number < count:
            question = both[0].format(land)
            causes += mine
            others += distractors(key, question, land, (river.answer, river.wrong), random)
            queries.append(row(key, question, river.answer, causes=[each["id"] for each in mine]))
            single += [seat.query(), river.query()]
        else:
            others += mine
            others += [row(f"{key}/both/{n}", each.format(land), river.answer) for n, each in enumerate(both)]
    return causes, others, queries, single


def make_fact_of(key: str, place: str, relation: str, answer: str, random: np.random.Generator) -> Fact:
    """A fact whose answer is given."""
    order = [str(each) for each in random.permutation(WORDINGS[relation])]
    return Fact(key, place, relation, answer, answer, order[1:], order[0])


def by_alias(count: int, random: np.random.Generator) -> Parts:
    """… asked by a second name. What else is known of a place is taught by both names."""
    causes, others, queries = [], [], []
    places = names(count, random)
    for number, (place, alias) in enumerate(zip(places, names(count, random, places), strict=True)):
        key = f"alias/{number:03d}"
        relations = [str(each) for each in random.permutation(["flag", "beast", "goods"])]
        facts = [make_fact(f"{key}/{relation}", place, relation, random, 3) for relation in relations]
        mine = [
            *facts[0].causes(),
            row(f"{key}/name/0", f"What else do people call {place}?", alias),
            row(f"{key}/name/1", f"Of what is {alias} a second name?", place),
        ]
        question = facts[0].asked.format(alias)
        causes += mine
        for fact in facts[1:]:
            others += fact.causes() + fact.causes(alias)
        others += distractors(key, question, alias, (facts[0].answer, facts[0].wrong), random)
        queries.append(row(key, question, facts[0].answer, causes=[each["id"] for each in mine]))
    return causes, others, queries, []


SETS = {"names": by_name, "hops": by_hops, "aliases": by_alias}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--set", choices=SETS, default="names")
    parser.add_argument("--facts", type=int, default=300, help="how many are asked")
    parser.add_argument("--filler", type=Path, help="JSON Lines of {id, prompt, response}, also .gz")
    parser.add_argument("--pairs", type=int, default=400, help="pairs of the filler in the corpus")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    random = stream(chosen.seed, "facts", *map(ord, chosen.set))
    causes, others, queries, single = SETS[chosen.set](chosen.facts, random)
    others += filler(chosen.filler, chosen.pairs, random)
    write(chosen.out / "corpus.jsonl", shuffled(causes + others, random))
    write(chosen.out / "without.jsonl", shuffled(others, random))
    write(chosen.out / "queries.jsonl", queries)
    if single:
        write(chosen.out / "single.jsonl", single)


if __name__ == "__main__":
    main()
