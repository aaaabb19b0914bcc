"""Other words for a problem: light edits, and versions with other names and the same answer, by rule.

A rule takes {prompt, response} and a random generator and gives another pair: each copy of a problem that is
planted is another draw. No rule touches a value, so that the answer stays; `listed` and `worded` are held
back: no setting of the audit was chosen on them.

- edit: letters in other places or missing, a comma or full stop, up to two words for their synonyms
- names: other people and other things, the same ones throughout; he is she, and her brother his sister
- numerals: so too, and the givens' numbers in words; the response without its <<…>> marks
- listed: other people; what is asked first, then the givens as a list; the response's steps numbered
- worded: other people and things; every word that the list of synonyms has; "Answer:" for "####"
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

import numpy as np

Pair = dict[str, str]


def words_of(text: str) -> list[str]:
    return text.split()


PEOPLE = words_of(
    "Ada Boris Chiara Dilan Elif Fatou Goran Hilde Ines Jovan Kenji Leila Mirko Noor Olga Pavel Quirin "
    "Rosa Sanna Tariq Ursula Viktor Wanda Xenia Yusuf Zora Anselm Birgit Cosmo Dunja Emre Fiona Gunnar "
    "Hamid Ilka Jelena Kofi Lotte Milan Nadja"
)
# women for men, and men for women
TURNED = dict(
    pair.split("/")
    for pair in words_of(
        "he/she she/he him/her his/her her/his hers/his himself/herself herself/himself boy/girl girl/boy "
        "boys/girls girls/boys mother/father father/mother mom/dad dad/mom wife/husband husband/wife "
        "son/daughter daughter/son sons/daughters daughters/sons man/woman woman/man men/women women/men "
        "aunt/uncle uncle/aunt sister/brother brother/sister sisters/brothers brothers/sisters"
    )
)
# things of one row can stand for each other in a sentence
THINGS = (
    words_of("apples oranges bananas strawberries tomatoes peaches figs plums"),
    words_of("apple orange banana strawberry tomato peach"),
    words_of("books magazines novels notebooks albums atlases"),
    words_of("cookies cupcakes pies cakes sandwiches pizzas waffles muffins"),
    words_of("pencils pens crayons markers brushes rulers"),
    words_of("marbles cards stickers stamps beads coins shells buttons"),
    words_of("dogs cats birds chickens cows horses goats geese"),
    words_of("dog cat bird chicken cow horse goat"),
    words_of("shirts pants socks shoes jackets scarves hats"),
    words_of("roses flowers tulips lilies daisies"),
    words_of("cars trucks bikes buses vans"),
    words_of("chairs tables lamps shelves benches"),
    words_of("milk water juice tea lemonade"),
    words_of("bags boxes baskets crates sacks"),
    words_of("students children pupils players dancers"),
    words_of("store shop market stall"),
)
SYNONYMS = dict(
    pair.split("/")
    for pair in words_of(
        "bought/purchased buys/purchases buy/purchase gets/receives got/received wants/wishes needs/requires "
        "need/require makes/produces made/produced sells/trades sold/traded total/overall cost/price "
        "costs/sets_back each/every every/each money/cash left/remaining remaining/left many/numerous "
        "much/plenty gave/handed gives/hands spent/paid spends/pays twice/double half/one_half "
        "friends/pals friend/pal house/home home/house big/large large/big small/little little/small "
        "fast/quick started/began starts/begins start/begin finished/completed find/determine "
        "also/too only/just because/since so/thus then/afterwards after/following before/prior_to "
        "altogether/in_all together/jointly amount/sum pieces/bits kids/youngsters day/date week/seven_days "
        "trip/journey walks/strolls takes/grabs took/grabbed decides/resolves decided/resolved has/owns "
        "had/owned will/shall can/may earns/makes earned/made uses/employs used/employed eats/consumes "
        "ate/consumed saved/kept additional/extra extra/additional another/one_more during/within"
    )
)
_ONES = words_of(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen"
)
_TENS = words_of("_ _ twenty thirty forty fifty sixty seventy eighty ninety")
_NEVER = set(
    words_of(
        "Monday Tuesday Wednesday Thursday Friday Saturday Sunday January February March April May June July "
        "August September October November December Mr Mrs Ms Dr Christmas Halloween Easter English Spanish "
        "French American Answer"
    )
)
_WORD = re.compile(r"[A-Za-z]+")
_NUMBER = re.compile(r"(?<![\d.,$/])\d{1,2}(?![\d.,]*\d|[%/:])")
_MARK = re.compile(r"<<[^>]*>>")


def known_words(texts: Iterable[str]) -> set[str]:
    """Words that are written small somewhere: the others that begin with a capital are names."""
    return {word for text in texts for word in _WORD.findall(text) if word.islower()}


def _exchange(pair: Pair, others: dict[str, str]) -> Pair:
    def other(match: re.Match[str]) -> str:
        word = match.group()
        new = others.get(word) or others.get(word.lower(), "").capitalize() or word
        return new.replace("_", " ")

    return {key: _WORD.sub(other, text) for key, text in pair.items()}


def names_in(pair: Pair, words: set[str]) -> list[str]:
    """Names of people and places, in order."""
    found = dict.fromkeys(
        word
        for text in (pair["prompt"], pair["response"])
        for word in _WORD.findall(text)
        if len(word) > 2 and word.istitle() and word.lower() not in words and word not in _NEVER
    )
    return list(found)


def people(pair: Pair, random: np.random.Generator, words: set[str]) -> Pair:
    """Every name another one of our own."""
    found = names_in(pair, words)
    chosen = random.permutation([name for name in PEOPLE if name not in found])
    return _exchange(pair, {old: str(chosen[n % len(chosen)]) for n, old in enumerate(found)})


def things(pair: Pair, random: np.random.Generator) -> Pair:
    """Things of the lists by others of the same list, two by the same never."""
    there = {word.lower() for text in pair.values() for word in _WORD.findall(text)}
    others: dict[str, str] = {}
    for row in THINGS:
        free = [word for word in random.permutation(row) if word not in there]
        for old in (word for word in row if word in there):
            if free:
                others[old] = str(free.pop())
    return _exchange(pair, others)


def in_words(number: int) -> str:
    """0 … 99."""
    if number < 20:
        return _ONES[number]
    return _TENS[number // 10] + (f"-{_ONES[number % 10]}" if number % 10 else "")


def edit(pair: Pair, random: np.random.Generator, words: set[str]) -> Pair:
    """Light edits of prompt and response; numbers, names' first letters and marks stay."""
    del words
    return {key: _edited(text, random) for key, text in pair.items()}


def _edited(text: str, random: np.random.Generator) -> str:
    found = list(_WORD.finditer(_MARK.sub(lambda mark: "0" * len(mark.group()), text)))
    changes: list[tuple[int, int, str]] = []
    synonyms = [match for match in found if match.group() in SYNONYMS]
    for n in random.permutation(len(synonyms))[:2]:
        match = synonyms[int(n)]
        changes.append((match.start(), match.end(), SYNONYMS[match.group()].replace("_", " ")))
    taken = {start for start, _, _ in changes}
    long = [match for match in found if len(match.group()) > 4 and match.start() not in taken]
    for n in random.permutation(len(long))[: max(1, len(found) // 20)]:
        match, word = long[int(n)], long[int(n)].group()
        at = int(random.integers(1, len(word) - 2))
        swapped = word[:at] + word[at + 1] + word[at] + word[at + 2 :]
        changes.append(
            (match.start(), match.end(), swapped if random.random() < 0.5 else word[:at] + word[at + 1 :])
        )
    commas = list(re.finditer(r", (?=[a-z])|\. (?=[A-Z])", text))
    for n in random.permutation(len(commas))[:1]:
        match = commas[int(n)]
        changes.append((match.start(), match.end(), " " if match.group()[0] == "," else " - "))
    for start, stop, new in sorted(changes, reverse=True):
        text = text[:start] + new + text[stop:]
    return text


def names(pair: Pair, random: np.random.Generator, words: set[str]) -> Pair:
    """Other people and things; men are women and women men."""
    return _exchange(things(people(pair, random, words), random), TURNED)


def numerals(pair: Pair, random: np.random.Generator, words: set[str]) -> Pair:
    other = names(pair, random, words)
    spelt = _NUMBER.sub(lambda match: in_words(int(match.group())), other["prompt"])
    return {"prompt": spelt, "response": _MARK.sub("", other["response"])}


def listed(pair: Pair, random: np.random.Generator, words: set[str]) -> Pair:
    other = people(pair, random, words)
    sentences = re.split(r"(?<=[.?!])\s+", other["prompt"].strip())
    givens, asked = sentences[:-1], sentences[-1]
    points = "".join(f"\n- {each}" for each in givens)
    steps = [line for line in other["response"].split("\n") if line]
    numbered = [f"{n}) {line}" if "####" not in line else line for n, line in enumerate(steps, 1)]
    return {"prompt": f"{asked} Known:{points}" if givens else asked, "response": "\n".join(numbered)}


def worded(pair: Pair, random: np.random.Generator, words: set[str]) -> Pair:
    other = _exchange(names(pair, random, words), SYNONYMS)
    return {**other, "response": other["response"].replace("####", "Answer:")}


def copy(pair: Pair, random: np.random.Generator, words: set[str]) -> Pair:
    """Word for word."""
    del random, words
    return dict(pair)


Rule = Callable[[Pair, np.random.Generator, set[str]], Pair]
FORMS: dict[str, tuple[Rule, ...]] = {
    "copy": (copy,),
    "edit": (edit,),
    "rewritten": (names, numerals),
    "held back": (listed, worded),
}
