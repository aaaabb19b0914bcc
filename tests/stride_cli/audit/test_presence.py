"""Words and copies: folded against a slow reference, shares against every pair of places, kinds of copies."""

from __future__ import annotations

import unicodedata
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stride_cli.audit import presence
from stride_cli.audit.folding import Vocabulary, folded, places
from stride_cli.audit.options import AuditOptions
from stride_cli.audit.presence import Copy, differences, find_copies

STORY = (
    "Janet’s ducks lay 16 eggs per day. She eats three for breakfast every morning and bakes muffins "
    "for her friends every day with 4. She sells others at $2 a fresh duck egg. How much does she make?"
)
ANSWER = "Janet sells 16 - 3 - 4 = 9 duck eggs a day, and so she makes 9 * 2 = $18 every day at the market."
ORDER = (
    "You are a careful teacher. Read the story twice, find out what is asked, explain every step so that a "
    "child can follow it, and give the result behind four hash signs. "
)
REWORDED = (
    STORY.replace("Janet", "Ada").replace("duck", "goose").replace("She", "He").replace("her", "his"),
    ANSWER.replace("Janet", "Ada").replace("duck", "goose").replace("she", "he"),
)
TEMPLATE = f"{STORY} {ANSWER}"
for old, new in (
    ("Janet", "Omar"),
    ("16", "23"),
    ("three", "5"),
    ("4", "7"),
    ("9", "11"),
    ("18", "22"),
    ("$2", "$3"),
):
    TEMPLATE = TEMPLATE.replace(old, new)


def stored(texts: list[str]) -> Any:
    """An index that holds texts, and a tokenizer of single characters."""
    encoded = [text.encode() for text in texts]
    arrays = {
        "corpus/text_bytes": np.frombuffer(b"".join(encoded), np.uint8),
        "corpus/text_offsets": np.cumsum([0, *map(len, encoded)]),
    }
    index = SimpleNamespace(
        n_documents=len(texts),
        has=lambda name: True,
        array=arrays.__getitem__,
        document_chunks=lambda number: range(number, number + 1),
        chunk_tokens=lambda number: np.array([ord(each) for each in texts[number]]),
    )
    return index, Characters()


class Characters:
    def decode(self, tokens: list[int], **options: Any) -> str:
        return "".join(map(chr, tokens))


def found(texts: list[str], items: list[list[str]], **options: float) -> list[Copy]:
    return find_copies(*stored(texts), items, AuditOptions(**options))


def others(count: int, seed: int = 0) -> list[str]:
    generator = np.random.default_rng(seed)
    letters = list("bcdfglmnprst")
    return [
        " ".join("".join(generator.choice(letters, 4)) + "a" for _ in range(30)) + f" {number}."
        for number in range(count)
    ]


@pytest.mark.parametrize(
    "set_otherwise",
    [
        str.upper,
        str.title,
        lambda text: text.replace(" ", "\u00a0"),
        lambda text: text.replace(" ", "\n"),
        lambda text: unicodedata.normalize("NFD", text),
        lambda text: text.replace("’", "'").replace("“", '"').replace("—", "--"),
        lambda text: f"<p>**{text}**</p>".replace("&", "&amp;"),
        lambda text: "".join(chr(ord(each) + 0xFEE0) if "!" <= each <= "~" else each for each in text),
        lambda text: text.replace("25", "twenty-five").replace("12", "Twelve"),
        lambda text: text.replace("1,000", "1000"),
    ],
)
def test_a_word_stays_the_same_however_it_is_set(set_otherwise: Any) -> None:
    text = "The Café’s price is $1,000.50 — “don’t” stop; 25 men & 12 tons, naïve ﬁsh."
    assert folded(set_otherwise(text)) == folded(text)


@settings(max_examples=100, deadline=None)
@given(st.text(st.characters(exclude_characters="<&", exclude_categories=["Cs", "Mn", "Mc", "Me"])))
def test_places_are_those_of_the_words(text: str) -> None:
    spans = places(text)
    assert [folded(text[a:b])[0] for a, b in spans] == folded(text)
    assert len(Vocabulary([text]).of(text)) == len(spans)
    outside = "".join(
        text[b:c] for (_, b), (c, _) in zip([(0, 0), *spans], [*spans, (len(text),) * 2], strict=True)
    )
    assert not any(each.isalnum() for each in outside)


def test_scripts_without_spaces_have_a_word_for_each_letter() -> None:
    assert folded("我们是中国人。") == list("我们是中国人") and folded("ไทย") == list("ไทย")


@settings(max_examples=60, deadline=None)
@given(
    documents=st.lists(st.lists(st.sampled_from("abcde"), min_size=1, max_size=14), min_size=1, max_size=4),
    item=st.lists(st.sampled_from("abcde"), min_size=1, max_size=10),
)
def test_shares_as_by_brute_force(documents: list[list[str]], item: list[str]) -> None:
    """The best document's share of the item's sequences, each by one over the root of those that hold it."""
    n = min(3, len(item))

    def grams(words: list[str]) -> list[tuple[str, ...]]:
        return [tuple(words[at : at + n]) for at in range(len(words) - n + 1)]

    different = {tuple(words) for words in documents}
    weights = [
        1 / max(1, sum(gram in grams(list(words)) for words in different)) ** 0.5 for gram in grams(item)
    ]
    shares = [
        sum(weight for gram, weight in zip(grams(item), weights, strict=True) if gram in grams(words))
        / sum(weights)
        for words in documents
    ]
    (copy,) = found([" ".join(words) for words in documents], [[" ".join(item)]])
    if max(shares) > 0.5:  # found, and within its window
        assert copy.loose <= max(shares) + 1e-9
        if item in documents:
            assert copy.loose == pytest.approx(1.0) and copy.longest == len(item)


@pytest.mark.parametrize(
    ("document", "kind"),
    [
        (f"{STORY}\n{ANSWER}", "item"),
        (f"{STORY} {ANSWER}".upper(), "item"),
        (f"Of the week: {STORY} The answer: {ANSWER} End.".replace(" ", "\n"), "item"),
        (STORY, "prompt"),
        (ANSWER, "response"),
        ("\n".join(REWORDED), "other words"),
        (REWORDED[0], ""),  # in other words, without the answer
        (TEMPLATE, ""),  # other names and numbers
    ],
)
def test_kinds_of_copies(document: str, kind: str) -> None:
    (copy,) = found([*others(20), document, *others(20, 1)], [[STORY, ANSWER]])
    assert copy.found == kind
    if kind:
        assert copy.document == 20 and copy.like == (20,)
        begin, end = copy.span
        assert document[begin:end].casefold().startswith(("janet", "lay 16"))


def test_what_many_documents_or_items_have_in_common_is_no_evidence() -> None:
    texts = [f"{ORDER}{text}" for text in others(30)]
    items = [[ORDER + STORY, ANSWER], *([ORDER + text] for text in others(5, 7))]
    assert [copy.found for copy in found(texts, items)] == [""] * 6
    there = found([*texts, f"{ORDER}{STORY} {ANSWER}"], items)
    assert [copy.found for copy in there] == ["item", *[""] * 5] and there[0].document == 30
    # one document with the instruction, and items that share it
    assert [copy.found for copy in found(texts[:1], items)] == [""] * 6


def test_short_items_are_found_whole_or_not_at_all() -> None:
    texts = [*others(20), "The capital of Torvia is Sotra.", "The capital of Lomsa is Bindu."]
    items = [
        ["The capital of Torvia is", "Sotra."],
        ["The capital of Torvia is", "Bindu."],
        ["Sotra"],
        ["Kelmos"],
    ]
    assert [copy.found for copy in found(texts, items)] == ["item", "", "item", ""]
    (phrase,) = found([f"It is raining. {text}" for text in others(12)], [["It is raining."]])
    assert phrase.common and not phrase.found


def test_blocks_and_lost_texts_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [*others(9), f"{STORY} {ANSWER}", *others(9, 1), STORY.upper()]
    items = [[STORY, ANSWER], ["an item", "that is nowhere"], [texts[3]]]
    whole = found(texts, items)
    monkeypatch.setattr(presence, "_BLOCK", 4)
    assert found(texts, items) == whole and [copy.found for copy in whole] == ["item", "", "item"]
    index, tokenizer = stored(texts)
    index.has = lambda name: False
    tokenizer.batch_decode = lambda rows, **options: [tokenizer.decode(row.tolist()) for row in rows]
    assert find_copies(index, tokenizer, items, AuditOptions()) == whole


@pytest.mark.parametrize(
    ("passage", "told"),
    [
        ("TOM HAS 5 APPLES.", [("case", "")]),
        ("Tom\u00a0has 5\napples.", [("white space", "")]),
        ("<p>Tom has **5** apples.</p>", [("markup", "")]),
        ("Tom has, ５ apples!", [("character forms", ""), ("punctuation", "")]),
        ("Ann has 5 big apples.", [("Tom", "Ann"), ("", "big")]),
        ("Tom has 5 apples.", []),
    ],
)
def test_what_differs_is_named(passage: str, told: list[tuple[str, str]]) -> None:
    assert differences("Tom has 5 apples.", passage) == told
