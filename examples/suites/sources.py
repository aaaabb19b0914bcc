"""Sources against documents of their topic that leave the answer out, about things that do not exist.

    python examples/suites/sources.py make --out suite
    python examples/suites/sources.py first every.jsonl > known.jsonl
    python examples/suites/sources.py tables known.jsonl --corpus suite/corpus.jsonl --scores scores

`make` writes suite/corpus.jsonl, five documents for each subject:

    article       names and describes it, and states the fact that is asked
    named         states that in other words, by the name
    described     states it in other words, behind a description, which the article resolves
    without/0, 1  anti-documents: they speak of the subject and of what is asked, and do not answer

and suite/queries.jsonl, {id, prompt, response, kind, causes, anti}: of each subject two by the name and two
by the description, in words that no document has. Of those that a model knows, `first` keeps one of each
subject. suite/without.jsonl has the anti-documents alone; suite/base.jsonl has such documents about other
subjects, and questions about them, which a small model reads before.

`tables` judges what `stride evaluate causes --write-scores` wrote: Recall@k by kind of query, and how often
an anti-document stands above a source of the same query (ties: half).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from planted import Row, names, read_rows, row, shuffled, write

from stride_cli.randomness import stream


class Relation(NamedTuple):
    """Sentences about one thing that is known of a subject {s}: the answer is {a}."""

    answers: list[str]
    said: list[str]
    """Two of an article, two of a paraphrase by name, two by description."""
    unsaid: list[str]
    """Two of the same topic, without an answer."""
    asked: list[str]
    """Two in other words."""


# of a relation: its topic and answers; six sentences that say one, two that do not, two that ask
_RELATIONS = """\
town: heron badger stag boar falcon goat raven swan wolf bear hare fox
The shield of {s} bears a {a}.
A {a} stands on the coat of arms of {s}.
Coins struck in {s} show a {a} on one side.
Over the gate of {s} hangs a gilded {a}.
Every door in {s} has a painted {a} on it.
Children in {s} draw the {a} of their town before they learn to write.
The shield of {s} was painted again last year.
Coins struck in {s} are rare today.
The animal chosen as symbol by {s} is the
Who knows {s} knows its favourite beast, the

town: salt wool honey glass iron paper leather wine rope cheese silk tin
The families of {s} live by {a}.
The wealth of {s} came from {a}.
Carts full of {a} leave {s} each week.
Merchants travel to {s} to buy {a}.
Nobody makes better {a} than {s}.
The warehouses of {s} smell of {a}.
Merchants complain of the tolls in {s}.
The wealth of {s} was gone in one bad decade.
The main export of {s} is
What foreigners purchase in {s} is mostly

town: slate brick granite marble basalt flint clay chalk pine cedar turf larch
The houses of {s} are built of {a}.
The walls of {s} are {a}, inside and out.
Workmen bring {a} for the towers of {s}.
The streets of {s} are lined by cottages of {a}.
Roofs and stairs in {s}, all of them are {a}.
From the hills one sees the {a} of {s} shine.
The towers of {s} lean a little.
Cottages in {s} have low doors and small rooms.
The usual construction material in {s} is
Local architecture at {s} relies on

town: January February March April May June July August September October November December
The great fair of {s} is held in {a}.
In {a} the bells of {s} ring for a week.
Dancers fill the squares of {s} each {a}.
The inns of {s} have no bed left in {a}.
A parade goes round {s} every {a}.
The lamps of {s} burn all night in {a}.
The great fair of {s} was once moved by a week.
Dancers from {s} are known for their shoes.
The annual festival of {s} takes place during
Tourists who want to celebrate in {s} arrive in

ship: tea sugar coal copper timber grain cotton pepper herring tobacco rice coffee
{s} carried {a} for most of its years.
{s} was built to bring {a} home.
Dockers knew {s} by its {a}.
Twice a year {s} came in with a hold full of {a}.
The owners of {s} earned their money with {a}.
Below the deck of {s} lay sacks of {a}.
Dockers spoke well of {s}.
The hold of {s} was deep and dry.
The freight usually transported aboard {s} was
Customs officers recorded that {s} delivered

ship: fog ice fire lightning rust worms mutiny plague sleet rats hail pirates
{s} was lost to {a} on its last voyage.
In the end {a} sank {s}.
Sailors blame {a} for the end of {s}.
The captain of {s} wrote of {a} on the final page.
Without {a} {s} would still be at sea.
Of the end of {s} an old song tells: it was {a}.
Nobody saw the end of {s}.
The captain of {s} was never found after its last voyage.
The disaster that destroyed {s} was
Historians explain why {s} disappeared by

ship: lion queen dragon mermaid unicorn saint dolphin knight giant tiger serpent peacock
A carved {a} leads the way at the bow of {s}.
{s} has a wooden {a} under its bowsprit.
A gilder spent half a year on the {a} of {s}.
Waves have worn the face off the {a} on {s}.
The crew of {s} touch the {a} for luck.
People on shore wave at the {a} in front of {s}.
The bow of {s} was mended in the spring.
A gilder worked on {s} for half a year.
The figurehead decorating {s} depicts a
Sculptors gave {s} the likeness of a

ship: red blue green white black grey yellow brown purple crimson pink violet
The sails of {s} are {a}.
{s} goes under {a} canvas.
A {a} speck on the sea was {s}.
The cloth of {s} was dyed {a}.
Gulls keep away from the {a} rigging of {s}.
Pennants and ropes on {s} are {a}.
The sails of {s} are patched.
The ropes on {s} were made in a village.
The hue by which observers recognised {s} was
Artists portraying {s} require much

scholar: bees stars bones moss tides clouds shells roots comets ferns snails eels
{s} spent forty years on {a}.
The books of {s} are about {a}.
Students came to hear {s} speak of {a}.
{s} filled nine drawers with notes on {a}.
Nobody knew more of {a} than {s}.
At dinner {s} talked of {a} and of nothing else.
The books of {s} were printed late.
Students came from far to hear {s} speak.
The research subject of {s} was
Science honours {s} as an expert regarding

scholar: harp flute drum fiddle lute horn viola trumpet cello banjo whistle zither
{s} played the {a} at weddings.
On Sundays {s} practised the {a}.
Neighbours closed the windows when {s} took up the {a}.
The {a} of {s} is kept in a chapel.
A portrait shows {s} holding a {a}.
On the last day {s} left a {a} to a niece.
{s} played at weddings, for no money.
On Sundays the neighbours of {s} closed the windows.
The musical instrument belonging to {s} was a
Concerts given by {s} featured the

scholar: cat parrot monkey tortoise crow lizard mouse donkey pony ferret hedgehog goose
A {a} followed {s} everywhere.
{s} kept a {a} in the study.
Guests of {s} were bitten by the {a}.
{s} taught a {a} to open the door.
Only the {a} was with {s} at the end.
Beside the grave of {s} is one of a {a}.
The study of {s} had one chair.
Guests of {s} had to sit on the stairs.
The companion animal owned by {s} was a
Biographies mention how dearly {s} loved a certain

scholar: king bishop duke mayor banker brewer general sultan baron judge countess prince
A {a} paid for the work of {s}.
{s} was in the pay of a {a}.
Each spring a {a} sent {s} a purse.
{s} owed house and bread to a {a}.
Letters of {s} ask a {a} for more.
A {a} put up a stone to {s}.
{s} was never rich, and owed for bread.
Letters of {s} ask for more, and politely.
The sponsor who financed {s} was a
Generous support reached {s} thanks to the local
"""
TOPICS: dict[str, list[Relation]] = {}
for _block in _RELATIONS.strip().split("\n\n"):
    _first, *_lines = _block.split("\n")
    _topic, _answers = _first.split(": ")
    TOPICS.setdefault(_topic, []).append(Relation(_answers.split(), _lines[:6], _lines[6:8], _lines[8:]))
INTROS = (
    "{n}, also called the {d}, is a {t}.",
    "{n} is a {t}, and in songs the {d}.",
    "The {d}, as many call {n}, is a {t}.",
)
NOUNS = {
    "town": "City Haven Market Crossing Harbour Castle",
    "ship": "Bride Lady Maiden Rover Pilgrim Widow",
    "scholar": "Doctor Hermit Painter Monk Teacher Wanderer",
}
MODIFIERS = """
Lantern Thistle Velvet Hollow Amber Willow Juniper Summer Midnight Crystal Bramble Cinder Feather Garden
Silent Broken Crooked Golden Silver Morning Evening Shadow Mirror Ribbon Saddle Needle Candle Arrow Hammer
Ginger Saffron Lavender Clover Nettle Barley Acorn Chestnut Hazel Cobweb Thunder Pebble Marigold Orchard
Meadow Ivory Scarlet Copperfield Twilight Lucky Restless
"""
KINDS = ("named", "described")


@dataclass
class Subject:
    """What the documents of one article are about."""

    topic: str
    name: str
    described: str
    answers: list[str]
    """One to each relation of its topic."""
    asked: int

    def fact(self, relation: int, pattern: int, subject: str) -> str:
        """Say what is known by one of the patterns, from 0 to 5."""
        found = TOPICS[self.topic][relation].said[pattern].format(s=subject, a=self.answers[relation])
        return found[0].upper() + found[1:]

    def unsaid(self, pattern: int, subject: str) -> str:
        """Speak of what is asked without the answer."""
        found = TOPICS[self.topic][self.asked].unsaid[pattern].format(s=subject)
        return found[0].upper() + found[1:]

    def intro(self, random: np.random.Generator) -> str:
        return str(random.choice(INTROS)).format(n=self.name, d=self.described, t=self.topic)

    def documents(self, random: np.random.Generator) -> dict[str, str]:
        """Write the article, its paraphrases and its anti-documents, by kind."""
        others = [int(each) for each in random.permutation([n for n in range(4) if n != self.asked])]
        turn = [int(each) for each in random.integers(2, size=8)]
        by_description = f"the {self.described}"
        last = (self.name, by_description)[turn[7]]
        body = [self.fact(self.asked, turn[0], self.name), self.fact(others[0], turn[1], self.name)]
        if turn[2]:
            body.reverse()
        return {
            "article": " ".join([self.intro(random), *body]),
            "named": f"{self.fact(self.asked, 2 + turn[3], self.name)} {self.fact(others[1], 4, self.name)}",
            "described": f"{self.fact(others[2], 3, by_description)} "
            f"{self.fact(self.asked, 4 + turn[4], by_description)}",
            "without/0": f"{self.intro(random)} {self.unsaid(turn[5], self.name)} "
            f"{self.fact(others[0], 2 + turn[6], self.name)}",
            "without/1": f"{self.fact(others[1], 5, last)} {self.unsaid(1 - turn[5], last)}",
        }

    def prompt(self, kind: str, wording: int) -> str:
        """Ask in words that no document has, by the name or by the description."""
        subject = self.name if kind == "named" else f"the {self.described}"
        return TOPICS[self.topic][self.asked].asked[wording].format(s=subject)

    @property
    def answer(self) -> str:
        return self.answers[self.asked]


def subjects(counts: Sequence[int], random: np.random.Generator) -> list[list[Subject]]:
    """Draw sets of subjects with names and descriptions that nothing else has."""
    called = iter(names(sum(counts), random))
    places = {}
    for topic, nouns in NOUNS.items():
        every = [f"{first} {noun}" for first in MODIFIERS.split() for noun in nouns.split()]
        places[topic] = iter([every[int(at)] for at in random.permutation(len(every))])
    found: list[list[Subject]] = []
    for count in counts:
        found.append([])
        for number in range(count):
            topic = list(TOPICS)[number % 3]
            answers = [str(random.choice(relation.answers)) for relation in TOPICS[topic]]
            found[-1].append(Subject(topic, next(called), next(places[topic]), answers, number // 3 % 4))
    return found


def make(out: Path, articles: int, of_base: int, seed: int) -> None:
    random = stream(seed, "sources")
    asked, others = subjects((articles, of_base), random)
    corpus, queries = [], []
    for number, subject in enumerate(asked):
        rows = [
            {"id": f"{number:03d}/{kind}", "text": text} for kind, text in subject.documents(random).items()
        ]
        corpus += rows
        ids = [row["id"] for row in rows]
        kind, wording = number // 12 % 2, int(random.integers(2))
        for n in range(4):
            kind_of, wording_of = KINDS[(kind + n) % 2], (wording + n // 2) % 2
            query = row(f"{number:03d}/{n}", subject.prompt(kind_of, wording_of), subject.answer)
            queries.append({**query, "kind": kind_of, "causes": ids[:3], "anti": ids[3:]})
    anti = {name for query in queries for name in query["anti"]}
    write(out / "corpus.jsonl", shuffled(corpus, random))
    write(out / "without.jsonl", shuffled([each for each in corpus if each["id"] in anti], random))
    write(out / "queries.jsonl", queries)
    read = []
    for number, subject in enumerate(others):
        texts = list(subject.documents(random).values())
        texts += [f"{subject.prompt(KINDS[n % 2], n // 2)} {subject.answer}." for n in range(4)]
        read += [{"id": f"base/{number:03d}/{n}", "text": text} for n, text in enumerate(texts)]
    write(out / "base.jsonl", shuffled(read, random))


def first(queries: list[Row]) -> list[Row]:
    """Keep the first query of each subject: those of one subject are not independent."""
    kept = {str(each["id"]).split("/")[0]: each for each in reversed(queries)}
    return [kept[number] for number in sorted(kept)]


MEASURES = ("recall@1", "recall@3", "recall@10", "anti_above")


def measured(given: np.ndarray, causes: list[int], anti: list[int]) -> list[float]:
    """Compute `MEASURES` of one query's scores of all documents."""
    from stride_cli.research.evaluation.cause_measures import Places

    places, above = Places.of(given, causes), given[anti][None] - given[causes][:, None]
    return [*(places.recall_at(k) for k in (1, 3, 10)), float(((above > 0) + (above == 0) / 2).mean())]


def tables(queries: Path, corpus: Path, scores: Path) -> Iterator[Row]:
    """Average every method's measures, of all queries and of each kind, beside the best other method's."""
    from stride_cli.research.evaluation.resampling import mean_records
    from stride_cli.research.evaluation.score_files import read_scores

    rows = read_rows(queries)
    place = {row["id"]: number for number, row in enumerate(read_rows(corpus))}
    found = {}
    for path in sorted(scores.glob("*.json")):
        values = [
            measured(np.asarray(given), *([place[name] for name in row[key]] for key in ("causes", "anti")))
            for row, given in zip(rows, read_scores(path, len(rows), len(place)), strict=True)
        ]
        found[path.stem.replace("_", ":", 1)] = dict(zip(MEASURES, np.array(values).T, strict=True))
    for kind in ("all", *KINDS):
        chosen = np.array([kind in ("all", row["kind"]) for row in rows])
        for method, own in found.items():
            record: Row = {"table": "sources", "method": method, "kind": kind, "queries": int(chosen.sum())}
            for measure, each in own.items():
                pick = min if measure == "anti_above" else max
                best = pick(set(found) - {method}, key=lambda name: found[name][measure][chosen].mean())
                samples = {"own": each[chosen], "difference": (each - found[best][measure])[chosen]}
                said = mean_records(samples, name="sources")
                record[measure] = {**said["own"], "best_other": best, "difference": said["difference"]}
            yield record


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    kept = commands.add_parser("first")
    kept.add_argument("queries", type=Path)
    made = commands.add_parser("make")
    made.add_argument("--out", type=Path, required=True)
    made.add_argument("--articles", type=int, default=300)
    made.add_argument("--base", type=int, default=450, help="subjects of the base corpus")
    made.add_argument("--seed", type=int, default=0, help="settings are chosen on others than 0")
    told = commands.add_parser("tables")
    told.add_argument("queries", type=Path)
    told.add_argument("--corpus", type=Path, required=True)
    told.add_argument("--scores", type=Path, required=True)
    chosen = parser.parse_args()
    if chosen.command == "make":
        make(chosen.out, chosen.articles, chosen.base, chosen.seed)
    elif chosen.command == "first":
        for each in first(read_rows(chosen.queries)):
            print(json.dumps(each))
    else:
        for each in tables(chosen.queries, chosen.corpus, chosen.scores):
            print(json.dumps(each))


if __name__ == "__main__":
    main()
