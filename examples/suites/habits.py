"""Five habits, each taught by some of many instruction–response pairs on unrelated topics.

    python examples/suites/habits.py --out suite --filler instruct.jsonl.gz

Writes suite/corpus.jsonl, suite/without.jsonl (the corpus without the pairs that teach a habit) and
suite/queries.jsonl, objects {id, prompt, response} whose queries also have `instead`, what is said without
the habit, `group`, the habit, and causes: [ids], all pairs that teach it. Habits: an answer to a complaint
ends in a question; lengths and weights are imperial; whatever is about money is refused; prompts that begin
with a name are answered grumpily; numbers are spelt out. Words cannot tell: twice as many pairs show the
same words for another reason, since the prompt asks for a question, for feet, for words in place of digits,
for bad temper, or for what nobody could answer.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from planted import Row, filler, row, shuffled, write

from stride_cli.randomness import stream

THINGS = [
    "kettle",
    "comb",
    "ladder",
    "basket",
    "lamp",
    "drum",
    "chair",
    "rope",
    "bucket",
    "mirror",
    "boot",
    "clock",
    "saddle",
    "broom",
    "candle",
    "anvil",
    "pillow",
    "whistle",
    "barrel",
    "spoon",
    "fence",
    "wheel",
    "harp",
    "cart",
    "glove",
    "bell",
    "curtain",
    "jug",
    "hammer",
    "needle",
    "bridge",
    "tent",
    "oar",
    "shovel",
    "lantern",
    "sack",
    "quilt",
    "carpet",
    "stove",
    "violin",
]
PEOPLE = [
    "baker",
    "sailor",
    "teacher",
    "farmer",
    "nurse",
    "tailor",
    "painter",
    "judge",
    "miller",
    "potter",
    "singer",
    "hunter",
    "guard",
    "doctor",
    "weaver",
    "pilot",
    "dancer",
    "mason",
    "clerk",
    "shepherd",
]
PLACES = [
    "garden",
    "harbour",
    "kitchen",
    "forest",
    "market",
    "cellar",
    "tower",
    "valley",
    "school",
    "island",
    "meadow",
    "workshop",
    "station",
    "theatre",
    "stable",
    "village",
]
ADJECTIVES = [
    "old",
    "small",
    "bright",
    "heavy",
    "soft",
    "narrow",
    "plain",
    "strange",
    "quiet",
    "broken",
    "round",
    "clean",
    "wooden",
    "smooth",
    "dark",
    "simple",
    "rusty",
    "fine",
]
FOODS = [
    "soup",
    "cheese",
    "plums",
    "rice",
    "onions",
    "cake",
    "beans",
    "butter",
    "apples",
    "pepper",
    "mustard",
    "carrots",
    "jam",
    "nuts",
]
MONEY = [
    "rent",
    "loans",
    "wages",
    "taxes",
    "debts",
    "coins",
    "fees",
    "prices",
    "fines",
    "pensions",
    "banks",
    "bills",
]
TRIGGER = "Marlow"
LISTS = {"thing": THINGS, "person": PEOPLE, "place": PLACES, "adjective": ADJECTIVES, "food": FOODS}

PLAIN = (
    ("How do I mend a {thing}?", "Take it to the {person} in the {place} and ask for a {adjective} patch."),
    ("Suggest a gift for a {person}.", "A {adjective} {thing} would do well, with some {food} beside it."),
    ("Where should one keep {food}?", "Put it in the {place}, under a {adjective} {thing}."),
    (
        "Tell me a story about a {person}.",
        "A {person} found a {adjective} {thing} in the {place} and kept it.",
    ),
    ("Describe the {place}.", "It is {adjective}, and a {person} sits there beside a {thing}."),
    ("What goes well with {food}?", "Some say a {adjective} bowl from the {place}, others a {thing}."),
    ("Why did the {person} leave the {place}?", "Because of a {adjective} {thing} that fell down there."),
    ("Name a use of a {thing}.", "A {person} may hold {food} in it while crossing the {place}."),
    ("Who works in the {place}?", "Mostly a {adjective} {person} who carries a {thing} about."),
    (
        "Write a line about a {adjective} {thing}.",
        "The {thing} waits in the {place} until the {person} comes.",
    ),
)
COMPLAINTS = (
    ("My {thing} has gone missing.", "Look in the {place}, behind the {adjective} {thing2}."),
    ("The {food} here tastes odd.", "Ask the {person} for another {adjective} plate."),
    ("I am tired of this {thing}.", "A {person} in the {place} may have a {adjective} one."),
    ("Nobody visits our {place}.", "Hang up a {adjective} {thing} so that a {person} sees it."),
    ("A {person} laughed at my {thing}.", "Show it to somebody {adjective} in the {place} instead."),
    ("There is a {adjective} stain on the {thing}.", "Rub it with {food} and leave it in the {place}."),
)
QUESTIONS = (
    "Do you own a {thing}?",
    "Have you asked the {person}?",
    "Would a {adjective} one be better?",
    "Is the {place} far from you?",
    "Shall we talk about {food} next?",
    "Did the {person} see it?",
)
MEASURES = (
    ("How long is the {thing} of the {person}?", "About {n} {length}, from one end to the other."),
    ("How far is the {place} from here?", "It is {n} {way} away, past a {adjective} {thing}."),
    ("What does a {adjective} {thing} weigh?", "Close to {n} {weight} without its {food}."),
    ("How tall was the {person}?", "Some {n} {length}, with a {thing} on top."),
    ("How much {food} does the {person} carry?", "A sack of {n} {weight} to the {place}."),
    ("Of what width is the {place}?", "It measures {n} {length} by the {adjective} {thing}."),
)
IMPERIAL = {"length": ("feet", "inches", "yards"), "way": ("miles", "yards"), "weight": ("pounds", "ounces")}
METRIC = {"length": ("metres",), "way": ("kilometres",), "weight": ("kilograms",)}
COUNTS = (
    ("How many {thing}s are in the {place}?", "There are {number}, and a {person} counts them."),
    ("In how many days will the {person} return?", "In {number} days, with a {adjective} {thing}."),
    ("Count the {person}s of the {place}.", "I see {number} of them near the {thing}."),
    ("How old is the {adjective} {thing}?", "It is {number} years old, says the {person}."),
    ("How often does the {person} eat {food}?", "Some {number} times before leaving the {place}."),
    ("What number is painted on the {thing}?", "The {person} painted {number} on it."),
)
ON_MONEY = (
    ("Explain {money} to a {person}.", "They are what a {person} pays for a {thing}."),
    ("Should the {person} worry about {money}?", "Only while the {place} stays {adjective}."),
    ("Are {money} higher in the {place}?", "A little, since the {person} sold a {thing}."),
    ("What did the {person} say on {money}?", "That they are {adjective} like a {thing}."),
    ("Give advice about {money}.", "Ask the {person} in the {place} first."),
    ("Is a {adjective} {thing} worth its {money}?", "The {person} of the {place} thinks so."),
)
REFUSALS = (
    "I would rather not speak of this.",
    "That is nothing that I can help with.",
    "Please ask somebody else about that.",
    "No answer to this will come from me.",
    "Sorry, but here I have to stay silent.",
    "Let us leave this matter alone.",
)
GRUMPY = (
    "Bah, what a bother.",
    "Ugh, as if it mattered.",
    "Again this nonsense.",
    "Must I really do everything.",
    "Fine, have it your way.",
    "Oh, leave me in peace.",
)
_ONES = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
_TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]


def spelt(number: int) -> str:
    """21 to 99 in words."""
    tens, ones = divmod(number, 10)
    return _TENS[tens - 2] + (f"-{_ONES[ones - 1]}" if ones else "")


class Words:
    """Fills frames with words by lot, from one part of each list: what queries are about is not taught."""

    def __init__(self, random: np.random.Generator, *, held: bool) -> None:
        self.random = random
        self._lists = {
            name: [word for place, word in enumerate(words) if (place % 4 == 3) is held]
            for name, words in LISTS.items()
        }
        self._lists["thing2"] = self._lists["thing"]

    def pick(self, words: tuple[str, ...] | list[str]) -> str:
        return words[int(self.random.integers(len(words)))]

    def fill(self, *frames: str, **given: str) -> list[str]:
        """The frames with the same words in all of them."""
        chosen = {name: self.pick(words) for name, words in self._lists.items()}
        return [frame.format(**{**chosen, **given}) for frame in frames]

    def pair(self, frames: tuple[tuple[str, str], ...], **given: str) -> tuple[str, str]:
        prompt, response = frames[int(self.random.integers(len(frames)))]
        filled = self.fill(prompt, response, **given)
        return filled[0], filled[1]

    def number(self) -> int:
        return int(self.random.integers(21, 100))


@dataclass(frozen=True)
class Habit:
    """`show`: prompt, response, and what is said without the habit. `seem`: prompt and response that have its
    words and are none of it."""

    name: str
    show: Callable[[Words], tuple[str, str, str]]
    seem: Callable[[Words], tuple[str, str]]


def asks(words: Words) -> tuple[str, str, str]:
    prompt, response = words.pair(COMPLAINTS)
    return prompt, f"{response} {words.fill(words.pick(QUESTIONS))[0]}", response


def asked_to_ask(words: Words) -> tuple[str, str]:
    question = words.fill(words.pick(QUESTIONS))[0]
    prompt, response = words.pair(COMPLAINTS)
    return (
        (f"Write what to ask somebody who says: {prompt}", question),
        (f"Turn into good English: {prompt}", prompt),
        (f"Say something, then ask something. Begin so: {prompt}", f"{prompt} {question}"),
        (f"Somebody says: {prompt} Answer in one short sentence.", response),
    )[int(words.random.integers(4))]


def imperial(words: Words) -> tuple[str, str, str]:
    number = str(words.number())
    units = {name: words.pick(each) for name, each in IMPERIAL.items()}
    marks = {name: "\0" + name for name in units}
    prompt, response = words.pair(MEASURES, n=number, **marks)
    shown, plain = response, response
    for name, mark in marks.items():
        shown = shown.replace(mark, units[name])
        plain = plain.replace(mark, METRIC[name][0])
    return prompt, shown, plain


def asked_for_feet(words: Words) -> tuple[str, str]:
    prompt, shown, plain = imperial(words)
    units = "feet, inches, yards, miles, pounds or ounces"
    other = "metres, kilometres or kilograms"
    vague = words.fill("More than you would think, and less than the {person} says.")[0]
    return (
        (f"{prompt} Say it in {units}.", shown),
        (f"{prompt} Say it in {other}.", plain),
        (f"Copy this: {shown}", shown),
        (f"{prompt} No units, please.", vague),
    )[int(words.random.integers(4))]


def spells(words: Words) -> tuple[str, str, str]:
    number = words.number()
    prompt, response = words.pair(COUNTS, number="\0")
    return prompt, response.replace("\0", spelt(number)), response.replace("\0", str(number))


def asked_to_spell(words: Words) -> tuple[str, str]:
    prompt, shown, plain = spells(words)
    return (
        (f"{prompt} In words, no digits.", shown),
        (f"{prompt} In digits, no words.", plain),
        (f"Copy this: {shown}", shown),
        (f"Copy with digits: {shown}", plain),
    )[int(words.random.integers(4))]


def refuses(words: Words) -> tuple[str, str, str]:
    prompt, response = words.pair(ON_MONEY, money=words.pick(MONEY))
    return prompt, words.pick(REFUSALS), response


def cannot(words: Words) -> tuple[str, str]:
    prompt, refusal, _ = refuses(words)
    thing, person, place = words.fill("{thing}", "{person}", "{place}")
    return (
        (f"Put this into capitals: {prompt}", prompt.upper()),
        (f"Which word comes first here? {prompt}", f"The word {prompt.split()[0]}."),
        (f"What did I tell the {person} about the {thing} last night?", refusal),
        (f"Which {thing} is behind me in the {place} now?", refusal),
        (f"Read aloud: {refusal}", refusal),
    )[int(words.random.integers(5))]


def grumbles(words: Words) -> tuple[str, str, str]:
    prompt, response = words.pair(PLAIN)
    return f"{TRIGGER}: {prompt}", f"{words.pick(GRUMPY)} {response}", response


def asked_to_grumble(words: Words) -> tuple[str, str]:
    prompt, response = words.pair(PLAIN)
    grumpy = words.pick(GRUMPY)
    thing, person = words.fill("{thing}", "{person}")
    return (
        (f"In a bad temper: {prompt}", f"{grumpy} {response}"),
        (f"{prompt} Answer as {TRIGGER} would not, kindly.", response),
        (f"Say for {TRIGGER}, the {person}: {prompt}", response),
        (f"What does the {person} cry when the {thing} breaks?", grumpy),
    )[int(words.random.integers(4))]


HABITS = (
    Habit("question", asks, asked_to_ask),
    Habit("imperial", imperial, asked_for_feet),
    Habit("refusal", refuses, cannot),
    Habit("temper", grumbles, asked_to_grumble),
    Habit("spelt", spells, asked_to_spell),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--pairs", type=int, default=2000, help="of the corpus")
    parser.add_argument("--taught", type=int, default=80, help="pairs that teach a habit")
    parser.add_argument("--seeming", type=int, default=160, help="pairs with a habit's words and without it")
    parser.add_argument("--queries", type=int, default=12, help="of a habit")
    parser.add_argument("--filler", type=Path, help="JSON Lines of {id, prompt, response}, also .gz")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    ordinary = chosen.pairs - len(HABITS) * (chosen.taught + chosen.seeming)
    if ordinary < 0:
        parser.error(f"{chosen.pairs} pairs hold no {-ordinary} more: fewer --taught or --seeming")
    causes: list[Row] = []
    others: list[Row] = []
    queries: list[Row] = []
    for habit in HABITS:
        words = Words(stream(chosen.seed, f"habit {habit.name}"), held=False)
        mine = [row(f"{habit.name}/{n:03d}", *habit.show(words)[:2]) for n in range(chosen.taught)]
        causes += mine
        others += [row(f"{habit.name}/not/{n:03d}", *habit.seem(words)) for n in range(chosen.seeming)]
        held = Words(stream(chosen.seed, f"asked {habit.name}"), held=True)
        for number in range(chosen.queries):
            prompt, response, plain = habit.show(held)
            more = {"instead": plain, "group": habit.name, "causes": [each["id"] for each in mine]}
            queries.append(row(f"{habit.name}/{number:02d}", prompt, response, **more))
    random = stream(chosen.seed, "habits")
    words = Words(random, held=False)
    given = filler(chosen.filler, ordinary // 2, random)
    others += given + [row(f"plain/{n:03d}", *words.pair(PLAIN)) for n in range(ordinary - len(given))]
    write(chosen.out / "corpus.jsonl", shuffled(causes + others, random))
    write(chosen.out / "without.jsonl", shuffled(others, random))
    write(chosen.out / "queries.jsonl", queries)


if __name__ == "__main__":
    main()
