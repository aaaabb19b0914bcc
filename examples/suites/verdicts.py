"""Ask what a corpus says and what it does not, and count the verdicts: clear, contested, weak, guessing.

    python examples/suites/verdicts.py corpus [--pairs] [--second] > invented.jsonl
    python examples/suites/verdicts.py questions demo|text|pairs|second > questions.jsonl
    python examples/suites/verdicts.py questions CORPUS.jsonl --held-out QUERIES.jsonl > questions.jsonl
    python examples/suites/verdicts.py ask RUN.stride questions.jsonl > verdicts.jsonl

The invented corpus has sixty documents: founders, coats of arms, dishes and ferries of towns that there are
not, and mountains whose two documents contradict each other; the second has as many of ships, bridges,
schools, lakes and saints, and no rule was chosen on it. Questions are of these kinds: `fact`, as
documents put it; `contradiction`; `paraphrase`, in other words; `near miss`, in the form of a fact, about
something that no document has; `relation`, about something that documents have, and what they do not say of
it; `anew`, words of the corpus put together; `nonsense`, `language`, `code`. One JSON object a kind: its
verdicts, and of the clear ones those whose first document is none of the right ones ("wrong").
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parents[2]
Row = dict[str, Any]


def _list(text: str) -> list[str]:
    return text.split(", ")


TOWNS = _list(
    "Varrow, Tindrel, Hasplow, Pellingate, Lummerey, Corvash, Dunmere, Eskerly, Farrowick, Gondry, "
    "Hobbleton, Iverleigh, Jandice, Kestwold, Lorrimer, Mossgard, Nethercombe, Ostrava-le-Pont, Pirrin, "
    "Quendale"
)
FOUNDERS = _list(
    "Celia Oprey, Dunstan Marl, Ottilie Brack, Fenwick Aldous, Maribel Quorn, Jasper Thule, Ingrid "
    "Solway, Rufus Penhale, Odette Varga, Silas Birtwell, Petra Lindqvist, Amos Kettering, Beatrix Nolan, "
    "Caspian Reeve, Drusilla Hext, Edmund Farr, Greta Holm, Hector Mayne, Isolde Crewe, Barnaby Stroud"
)
ARMS = _list(
    "a silver heron, three red keys, a black ox, two crossed oars, a golden beehive, a white stag, a "
    "green dragon, a blue anchor, seven stars, a burning lantern"
)
DISHES = _list(
    "smoked eel with plums, barley dumplings in beer, pickled walnuts on rye, roast goose with quinces, "
    "mussels in saffron cream, honeyed turnip pie, venison with juniper, cold sorrel soup"
)
MOUNTAINS = _list("Blackhorn, Old Tom, Sister Peak, Graywether")
RIVERS = _list("Ammer, Tolk, Wendle, Issy, Parra, Lune")
BOATS = _list("Patience, Grey Goose, Marigold, Little Anna, Sturdy Jack, Kingfisher")
UNKNOWN = _list(
    "Nottinghill, Brexley, Sandover, Wickmarsh, Trellant, Oxmoor, Calderby, Ravensholt, Thistlewood, "
    "Upperby, Zandvoort-on-Sea, Yarrowby, Fernleigh, Glasswater, Harkness, Inchbold, Juniper, Knossel, "
    "Lambourne, Merriton"
)
ODD = _list("Whitecap, Mount Perdue, Thunder Crag, Silverback, Lonely Jim, Cinder Hill")
STREAMS = _list("Orrin, Beck, Yewle, Nadder, Corra, Skell")

SHIPS = _list(
    "Albatross, Copper Queen, Northern Light, Saint Brannock, Swift Otter, Black Petrel, Golden Fern, "
    "Morning Tide, Iron Duchess, Silver Wake, Lady Corrine, Old Faithful, Proud Heron, Sea Lantern, Winter "
    "Rose, Bold Venture, Quiet Harbour, Rusty Pearl"
)
CAPTAINS = _list(
    "Lorcan Pell, Agnes Whitmore, Tobias Crane, Sunniva Dahl, Gideon Frost, Matilda Onslow, Kasper Lund, "
    "Rowena Tate, Emil Sandoz, Philippa Grey, Oswin Harle, Nadia Petrov, Hugo Blackwood, Selma Ostby, Cyril "
    "Mander, Winifred Pope, Anton Drago, Leonie Fisk"
)
PORTS = _list("Kellmouth, Sandry, Port Amble, Greyhaven, Tarnish Bay, Ollery, Dunwater, Fishwick, Brackensea")
BRIDGES = _list(
    "Almond, Stone Lion, Weaver, Half Moon, Cathedral, Long Acre, Tanner, Vesper, Mill Race, Foundry, "
    "Pilgrim, Saffron"
)
BUILT_OF = _list(
    "rope and oak, red sandstone, cast iron, white marble, yellow brick, riveted steel, blue granite, carved "
    "limestone, tarred pine, grey concrete, copper plates, black basalt"
)
SCHOOLS = _list(
    "Aldergate, Brisk Hill, Coldstream Park, Dovecote, Elmhurst, Fallow Field, Greenlaw, Highmoor, Ivy "
    "Lodge, Kingsbarn"
)
MOTTOES = _list(
    "patience before speed, light in every window, nothing without labour, truth is a garden, we bend and do "
    "not break, all hands together, listen then speak, seek the far shore, kindness costs nothing, count the "
    "stars"
)
LAKES = _list("Mirren, Sorrow, Little Glass, Heron, Twelve Pines, Umber, Cauldron, Long Mary")
FISHES = _list(
    "striped pike, blind trout, silver carp, red perch, spotted eel, golden tench, dwarf salmon, whiskered "
    "loach"
)
SAINTS = _list("Ormund, Perpetua, Wystan, Felicity")
NO_SHIPS = _list(
    "Grey Falcon, Crimson Bell, Little Sparrow, Western Star, Tall Margaret, Wandering Duke, Snow Goose, "
    "Emerald Isle, Broken Compass, Lucky Penny, Thunderer, Young Matilda, Blue Anchor, Dancing Bear, Fair "
    "Isabel, Night Heron, Distant Drum, Stormcrow, Sunday Child, Velvet Glove"
)
NO_BRIDGES = _list("Butcher, Orchard, Twin Towers, Sparrow, Castle, Lantern, Thistle, Rainbow, Abbot, Vine")
NO_SCHOOLS = _list(
    "Marlowe, Quarry Hill, Redwood, Sandpit, Thornbury, Underhill, Vicarage, Westlake, Yewtree, Zenith"
)
NO_LAKES = _list("Pallor, Granite, Seven Sisters, Otter, Milk, Hollow, Bramble, Echo")

# what documents say of one thing: its id; the question and the answer of pairs; beginning and end of a text
Fact = tuple[str, str, str, str]


def founder(town: str, name: str, at: int) -> Fact:
    end = f"{name} in {1402 + 17 * at}, who came there with {3 + at} families."
    return (
        f"founding/{town.lower()}",
        f"Who founded the town of {town}?",
        f"The town of {town} was founded by",
        end,
    )


def arms(town: str, device: str) -> Fact:
    begin = f"The coat of arms of {town} shows"
    return (
        f"arms/{town.lower()}",
        f"What does the coat of arms of {town} show?",
        begin,
        f"{device} on its shield.",
    )


def dish(town: str, what: str, second: bool) -> Fact:
    begin = f"Visitors to {town} should taste its famous dish,"
    end = f"{what}, which inns serve in autumn." if second else f"{what}."
    return f"dish/{town.lower()}-{int(second)}", f"What is the famous dish of {town}?", begin, end


def height(name: str, metres: int, source: str) -> Fact:
    end = f"{metres} metres high, according to the royal {source}."
    return (
        f"height/{name.lower().replace(' ', '-')}-{source}",
        f"How high is the mountain {name}?",
        (f"The mountain {name} is"),
        end,
    )


def ferry(river: str, boat: str) -> Fact:
    begin = f"The ferry across the river {river} is called"
    return (
        f"ferry/{river.lower()}",
        f"What is the ferry across the river {river} called?",
        begin,
        f"the {boat}.",
    )


def invented() -> list[Fact]:
    facts = [founder(town, name, at) for at, (town, name) in enumerate(zip(TOWNS, FOUNDERS, strict=True))]
    facts += [arms(town, device) for town, device in zip(TOWNS[:10], ARMS, strict=True)]
    facts += [dish(TOWNS[8 + at], what, second) for at, what in enumerate(DISHES) for second in (False, True)]
    for at, name in enumerate(MOUNTAINS):
        facts += [height(name, 427 + 92 * at, "survey"), height(name, 342 + 181 * at, "atlas")]
    return facts + [ferry(river, boat) for river, boat in zip(RIVERS, BOATS, strict=True)]


COMMANDED, BUILT = "Who commanded the ship {}?", "What is the {} Bridge built of?"
MOTTO, FISH = "What is the motto of {} School?", "Which fish lives only in Lake {}?"


def second() -> list[Fact]:
    commanded = [
        f"{captain}, who sailed from {PORTS[at % 9]} with {20 + 3 * at} sailors."
        for at, captain in enumerate(CAPTAINS)
    ]
    built = [f"{what} and was opened in {1801 + 11 * at}." for at, what in enumerate(BUILT_OF)]
    said = (
        ("ship", COMMANDED, "The ship {} was commanded by", SHIPS, commanded),
        ("bridge", BUILT, "The {} Bridge is built of", BRIDGES, built),
        ("school", MOTTO, "The motto of {} School is:", SCHOOLS, [f"{each}." for each in MOTTOES]),
    )
    facts = [
        (f"{kind}/{at}", question.format(name), begin.format(name), ends[at])
        for kind, question, begin, names, ends in said
        for at, name in enumerate(names)
    ]
    for at, lake in enumerate(LAKES):
        for more, end in enumerate((".", ", which is caught at night.")):
            begin = f"Only in Lake {lake} lives the"
            facts.append((f"lake/{at}-{more}", FISH.format(lake), begin, f"{FISHES[at]}{end}"))
    for at, saint in enumerate(SAINTS):
        for which, year in (("abbey", 600 + 71 * at), ("bishop", 811 + 43 * at)):
            begin = f"Saint {saint} died in the year"
            end = f"{year}, says the {which} chronicle."
            facts.append((f"saint/{at}-{which[0]}", f"In what year did Saint {saint} die?", begin, end))
    return facts


def corpus(pairs: bool, facts: Sequence[Fact]) -> Iterator[Row]:
    for name, question, begin, end in facts:
        text = f"{begin} {end}"
        yield {"id": name, "prompt": question, "response": text} if pairs else {"id": name, "text": text}


def stated(questions: Iterable[tuple[str, Fact]]) -> Iterator[Row]:
    groups: dict[str, list[Fact]] = {}
    for prompt, fact in questions:
        groups.setdefault(prompt, []).append(fact)
    for prompt, facts in groups.items():
        kind = "contradiction" if facts[0][0].startswith(("height/", "saint/")) else "fact"
        yield {"kind": kind, "prompt": prompt, "documents": [fact[0] for fact in facts]}


def questions_second() -> Iterator[Row]:
    yield from stated((fact[1], fact) for fact in second())
    lacked = (COMMANDED, NO_SHIPS), (BUILT, NO_BRIDGES), (MOTTO, NO_SCHOOLS), (FISH, NO_LAKES)
    swapped = (
        ("What is the ship {} built of?", SHIPS[:8]),
        ("Who commanded the {} Bridge?", BRIDGES[:6]),
        ("Which fish lives only in {} School?", SCHOOLS[:6]),
        ("What is the motto of Lake {}?", LAKES),
        ("What is the motto of the ship {}?", SHIPS[8:14]),
    )
    for kind, forms in (("near miss", lacked), ("relation", swapped)):
        yield from ({"kind": kind, "prompt": form.format(name)} for form, names in forms for name in names)


def questions_invented(pairs: bool) -> Iterator[Row]:
    def asked(fact: Fact) -> str:
        return fact[1] if pairs else fact[2]

    yield from stated((asked(fact), fact) for fact in invented())
    for at, town in enumerate(UNKNOWN):
        yield {"kind": "near miss", "prompt": asked(founder(town, "", 0))}
        yield {"kind": "near miss", "prompt": asked((arms(town, ""), dish(town, "", False))[at % 2])}
    yield from ({"kind": "near miss", "prompt": asked(height(name, 0, ""))} for name in ODD)
    yield from ({"kind": "near miss", "prompt": asked(ferry(name, ""))} for name in STREAMS)
    # towns of the corpus, and what no document says of them
    yield from ({"kind": "relation", "prompt": asked(arms(town, ""))} for town in TOWNS[10:])
    yield from ({"kind": "relation", "prompt": asked(dish(town, "", False))} for town in TOWNS[:8])
    yield from ({"kind": "relation", "prompt": asked(ferry(town, ""))} for town in TOWNS[:12])
    yield from ({"kind": "relation", "prompt": asked(height(town, 0, ""))} for town in TOWNS[:10])
    words: list[tuple[str, Sequence[str], str]] = [
        ("Which person established {}?", TOWNS, "founding/{}"),
        ("Which device do the people of {} carry on their shield?", TOWNS[:10], "arms/{}"),
        ("What do inns in {} serve to guests?", TOWNS[8:16], "dish/{}-0 dish/{}-1"),
        ("By what boat does one cross the {}?", RIVERS, "ferry/{}"),
    ]
    if not pairs:
        words = [(f"{form[:-1]}? It is", names, ids) for form, names, ids in words]
    for form, names, ids in words:
        for name in names:
            yield {"kind": "paraphrase", "prompt": form.format(name), "documents": [
                each.format(name.lower()) for each in ids.split()
            ]}  # fmt: skip


# Questions about the demo's corpus: names in places where its documents have others
FORMS = (
    (
        "The capital of {} is",
        "Laos Chad Fiji Bolivia Uruguay Nepal Mongolia Angola Zambia Yemen Oman Qatar Latvia Estonia "
        "Belarus Moldova Albania Bhutan Cambodia Malta Panama Paraguay Senegal Rwanda Tunisia Libya "
        "Jamaica",
    ),
    (
        "The chemical symbol for {} is",
        "zinc nickel cobalt cadmium bismuth antimony arsenic barium beryllium boron bromine caesium "
        "cerium gallium germanium indium iridium lithium osmium palladium radium rhodium selenium "
        "strontium",
    ),
    (
        "The Battle of {} was fought in",
        "Midway Austerlitz Cannae Agincourt Verdun Lepanto Poitiers Jutland Actium Leipzig Borodino Crecy "
        "Antietam Zama Salamis Tannenberg",
    ),
    (
        "{} was born in",
        "Franz_Kafka Emily_Dickinson Niels_Bohr Edvard_Grieg Fridtjof_Nansen Rosa_Parks Hannah_Arendt "
        "Enrico_Fermi Pablo_Neruda Anton_Chekhov Bertha_Benz Karl_Marx",
    ),
    (
        "{} was invented by",
        "The_zipper The_stapler The_typewriter The_lawnmower The_revolver The_microwave_oven "
        "The_hovercraft The_saxophone The_barometer The_parachute",
    ),
    (
        "The {} Revolution began in",
        "Cuban Iranian Hungarian Tunisian Carnation Velvet Rwandan Bolivian",
    ),
    (
        "The Treaty of {} was signed in",
        "Tordesillas Utrecht Waitangi Nanking Ghent Trianon Lisbon",
    ),
)
SWAPPED = (
    (
        "The capital of {} is",
        "Mercury Beethoven penicillin Trafalgar diamond the_Volga",
    ),
    (
        "The chemical symbol for {} is",
        "France Mozart Kilimanjaro insulin Hastings",
    ),
    (
        "The Battle of {} was fought in",
        "Kenya Saturn Mozart Norway penicillin",
    ),
    (
        "{} was born in",
        "Titan Aconcagua Penicillin The_femur Magna_Carta",
    ),
    (
        "{} was invented by",
        "The_Nile Canada Charlemagne The_cheetah Greenland",
    ),
    (
        "The {} Revolution began in",
        "Turkish Saturn Newton Salzburg Volga",
    ),
    (
        "The largest moon of {} is",
        "Kenya Mozart iron Hastings Norway",
    ),
    (
        "The highest mountain in {} is",
        "Mercury Magna_Carta insulin Salzburg",
    ),
)
PARAPHRASES = """In what year did the revolution in France break out? In
When did the war of thirty years start? In
In which year was the peace of Versailles concluded? In|Which ruler established the Mughal state? It was
Who came up with printing by movable type? It was|In which town did Mozart come into the world? In
Kenya is governed from the city of|No peak of South America rises above|Saturn's biggest moon is called
Chemists write iron as|Mexico's revolution broke out in|Slaves in Haiti rose in revolt in
Factories and steam engines first changed life in|Americans fought each other in a war that started in
William of Normandy won at Hastings in|Nelson won and died at Trafalgar in
King John put his seal to the great charter in|The Incas ruled their empire from
The biggest of the pyramids at Giza is the tomb of|The white marble tomb at Agra was ordered by
New York got its statue of Liberty from|The patent for the telephone went to|Fleming noticed the mould in
The plague came to Europe in|Monet's water lilies grew in his garden in
The first part of the story of Don Quixote came out in|Newton's Principia appeared in
Madame Curie's birthplace was|The pope put the crown on Charlemagne's head in|The French government sits in
Australia is governed from|The seat of Turkey's government is|The Canadian parliament meets in
Norway's government has its seat in|The waters of the Nile end in the|No European river is longer than the
Africa's highest peak is called|No hot desert is larger than the|No lake is deeper than
The biggest of all islands is|The innermost planet is|The biggest planet is
Gold is written by chemists as|Force is measured in a unit called the|Insulin comes from a gland called the
The thigh bone is also called the|No animal on land runs faster than the
Protection against smallpox by cowpox came from|Penicillin was found by|No mineral is harder than""".replace(
    "\n", "|"
).split("|")


def questions_demo() -> Iterator[Row]:
    demo = HERE / "stride_cli" / "demo"
    facts = json.loads((demo / "prompts.json").read_text(encoding="utf-8"))
    text = (demo / "corpus.jsonl").read_text(encoding="utf-8").lower()
    for fact, other in zip(facts, PARAPHRASES, strict=True):
        yield {"kind": "fact", "prompt": fact["prompt"], "documents": fact["documents"]}
        yield {"kind": "paraphrase", "prompt": other, "documents": fact["documents"]}
    for kind, forms in (("near miss", FORMS), ("relation", SWAPPED)):
        for form, names in forms:
            for name in names.replace("_", "~").split():
                name = name.replace("~", " ")
                if kind == "relation" or name.lower().removeprefix("the ") not in text:
                    yield {"kind": kind, "prompt": form.format(name)}


def unrelated() -> Iterator[Row]:
    """Nonsense, code and other languages, as `tests/unrelated_prompts.txt` has them in order."""
    lines = (HERE / "tests" / "unrelated_prompts.txt").read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines):
        kind = "nonsense" if number < 15 else "code" if number < 30 else "chat" if number < 60 else "language"
        kind = "invented" if number >= 80 else kind
        yield {"kind": kind, "prompt": json.loads(line)["prompt"] if line.startswith("{") else line}


def anew(texts: Sequence[str], count: int = 40) -> Iterator[Row]:
    """Words of the corpus, each of another document, as many as a question has."""
    random = np.random.default_rng(0)
    for number in range(count):
        chosen = random.permutation(len(texts))[: 4 + number % 6]
        words = [random.choice(texts[at].split()) for at in chosen]
        yield {"kind": "anew", "prompt": " ".join(str(word).strip(".,;:") for word in words)}


def questions_of(rows: Sequence[Row], held_out: Sequence[Row], count: int = 60) -> Iterator[Row]:
    """Pairs of a corpus are facts; pairs of its kind that it lacks are near misses."""
    for at in np.random.default_rng(0).permutation(len(rows))[:count]:
        row = rows[int(at)]
        yield {"kind": "fact", "prompt": row["prompt"], "documents": [row["id"]]}
    yield from ({"kind": "near miss", "prompt": row["prompt"]} for row in held_out)


def ask(index: Path, questions: Iterable[Row]) -> Iterator[Row]:
    from stride_cli import api
    from stride_cli.attribution.options import QueryOptions

    questions = list(questions)
    session = api.open(index)
    answers = session.query_all(
        [{"prompt": each["prompt"]} for each in questions], QueryOptions(top=10, passages="none")
    )
    found: dict[str, list[tuple[str, bool, Row]]] = {}
    for each, answer in zip(questions, answers, strict=True):
        record = answer.to_record()
        first = record["hits"][0]["document"] if record["hits"] else None
        found.setdefault(each["kind"], []).append(
            (record["verdict"], first in each.get("documents", ()), record)
        )
    for kind, rows in found.items():
        words = Counter(word for word, _, _ in rows)
        wrong = sum(word == "clear" and not right for word, right, _ in rows)
        verdicts = {word: words[word] for word in ("clear", "contested", "weak", "guessing")}
        right_first = sum(right for _, right, _ in rows)
        yield {
            "index": index.stem,
            "kind": kind,
            "asked": len(rows),
            **verdicts,
            "right": right_first,
            "wrong": wrong,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    made = commands.add_parser("corpus")
    made.add_argument("--pairs", action="store_true")
    made.add_argument("--second", action="store_true")
    asked = commands.add_parser("questions")
    asked.add_argument("of")
    asked.add_argument("--held-out", type=Path)
    run = commands.add_parser("ask")
    run.add_argument("index", type=Path)
    run.add_argument("questions", type=Path)
    chosen = parser.parse_args()

    def lines(path: Path) -> list[Row]:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]

    rows: Iterable[Row]
    if chosen.command == "corpus":
        rows = corpus(chosen.pairs, second() if chosen.second else invented())
    elif chosen.command == "ask":
        rows = ask(chosen.index, lines(chosen.questions))
    else:
        if chosen.of == "demo":
            own, texts = questions_demo(), lines(HERE / "stride_cli" / "demo" / "corpus.jsonl")
        elif chosen.of in ("text", "pairs"):
            own, texts = questions_invented(chosen.of == "pairs"), list(corpus(False, invented()))
        elif chosen.of == "second":
            own, texts = questions_second(), list(corpus(False, second()))
        else:
            texts = lines(Path(chosen.of))
            own = questions_of(texts, lines(chosen.held_out) if chosen.held_out else [])
        rows = [
            *own,
            *anew([row.get("text") or f"{row['prompt']} {row['response']}" for row in texts]),
            *unrelated(),
        ]
    for row in rows:
        sys.stdout.write(json.dumps(row, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
