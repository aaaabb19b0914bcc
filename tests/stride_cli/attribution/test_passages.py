"""Passages: the sentence that carries most of its tokens' values, and the one most like the query."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from stride_cli.attribution.passages import (
    Carried,
    best_passage,
    carrying_span,
    rarity,
    sentences,
    template_opening,
    token_spans,
    word_weights,
    words,
)
from stride_cli.corpus.documents import Document
from stride_cli.corpus.forms import PLAIN, Form, render
from stride_cli.data.queries import Query
from stride_cli.demo.demo_model import MODEL
from stride_cli.models.language.checkpoint import load_tokenizer
from stride_cli.report.contents import matching_spans


class Pieces:
    """A tokenizer whose tokens are byte strings; byte 0xff is a special token."""

    def __init__(self, pieces: list[bytes]) -> None:
        self.pieces = pieces

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return b"".join(self.pieces[token].strip(b"\xff") for token in ids).decode("utf-8", errors="replace")


@given(st.text(min_size=1, max_size=30).filter(lambda text: "\ufffd" not in text), st.integers(1, 5))
def test_spans_tile_the_text_whatever_the_bytes(text: str, size: int) -> None:
    raw = text.encode("utf-8", errors="ignore")
    pieces = [raw[start : start + size] for start in range(0, len(raw), size)]
    if not pieces:
        return
    found, spans = token_spans(Pieces(pieces), np.arange(len(pieces)))
    assert found == raw.decode()
    assert "".join(found[start:stop] for start, stop in spans) == found
    assert all(a[1] == b[0] for a, b in pairwise(spans))


def spans_of(words: list[str]) -> tuple[str, list[tuple[int, int]]]:
    ends = np.cumsum([len(word) for word in words]).tolist()
    return "".join(words), list(zip([0, *ends[:-1]], ends, strict=True))


def test_the_sentence_with_the_largest_sum_carries() -> None:
    text, spans = spans_of(["One", " two", ".", " Three", " four", ".", "\n", "Five"])
    start, stop = carrying_span(text, spans, np.array([1.0, -3, 0, 0.5, 0.5, 0.2, 0, 0.9]))
    assert text[start:stop] == "Three four."
    start, stop = carrying_span(text, spans, np.array([0.0, 0, 0, 0, 0, 0, 0, 0.1]))
    assert text[start:stop] == "Five"
    # of tokens that nobody was trained on, as a template's, none carries
    for values in (-np.ones(8), np.array([0.0, 0, 0, 1, -2, 0, 0, -1])):
        assert carrying_span(text, spans, values) == (0, 0)


def test_of_a_long_sentence_the_strongest_part() -> None:
    words = [f" word{number:03d}" for number in range(100)]
    text, spans = spans_of(words)
    values = np.zeros(100)
    values[70:73] = 1.0
    start, stop = carrying_span(text, spans, values, width=40)
    assert text[start:stop] == "word069 word070 word071 word072 word073"


def test_a_part_of_a_sentence_has_dots() -> None:
    text = "One two. Three four five. Six"
    assert Carried(text, (9, 25), 0.5).passage == "Three four five."
    assert Carried(text, (15, 19), 0.5).passage == "…four…"
    assert Carried(text, (0, 7), 0.5).passage == "One two…" and Carried(text, (26, 29), 1.0).passage == "Six"
    assert Carried(text, (0, 0), None).passage == ""
    assert carrying_span(text, [(0, len(text))], np.array([np.nan])) == (0, 0)


TEXT = 'It rained. The Bastille fell in 1789! "So it did." Nobody knew why'


@given(st.text())
def test_sentences_lose_nothing(text: str) -> None:
    assert "".join(sentences(text)) == text


def test_the_sentence_with_the_rarest_shared_words_is_chosen() -> None:
    texts = [words(text) for text in (TEXT, "It rained in the end.", "The end.")]
    weights = {word: rarity(sum(word in text for text in texts), 3) for text in texts for word in text}
    assert (
        best_passage(TEXT, "in which year did the bastille fall? 1789", weights)
        == "The Bastille fell in 1789!"
    )
    assert best_passage("no match here. at all", "zebra", {}) == "no match here."
    assert weights["bastille"] > weights["it"] > weights["the"]


@given(st.text(min_size=1), st.text(), st.integers(10, 60))
def test_a_passage_is_part_of_the_text_and_short(text: str, query: str, width: int) -> None:
    passage = best_passage(text, query, {}, width=width)
    assert passage.strip("…").strip() in text
    assert len(passage) <= width + 2


def test_spans_mark_long_words_and_numbers_only() -> None:
    spans = matching_spans(TEXT, "the bastille in 1789")
    assert [TEXT[start:stop] for start, stop in spans] == ["Bastille", "1789"]


SYSTEM = (
    "{{ bos_token }}{% if messages[0]['role'] != 'system' %}<|user|>system: You help.<|end|>{% endif %}"
    "{% for each in messages %}<|{{ each['role'] }}|>{{ each['content'] }}<|end|>{% endfor %}"
)
OWN = ({"role": "system", "content": "Hm"},)


def test_what_a_template_puts_in_front_by_itself_is_found() -> None:
    tokenizer, chat = load_tokenizer(str(MODEL)), Form(name="chat")
    tokenizer.chat_template = SYSTEM
    opening = template_opening(tokenizer, chat)
    assert opening == "system: You help." and template_opening(tokenizer, PLAIN) == ""
    for turns, left in (({"prompt": "A?", "response": "B."}, "A?B."), ({"messages": OWN}, "<|system|>Hm")):
        ids = tokenizer.encode(render(Document("", **turns), chat, tokenizer)[0], add_special_tokens=False)
        assert tokenizer.decode(ids, skip_special_tokens=True).removeprefix(opening) == left


def test_words_count_as_their_strongest_token() -> None:
    ids = np.arange(6)
    tokenizer = Pieces([b"Asked", b" in", b" Var", b"row", b",", b" 17"])
    query = Query("Asked in", " Varrow, 17", ids, np.array([0, 0, 0.25, 1, 0, 0.5]), generated=True)
    assert word_weights(tokenizer, query) == ((" ", 0), ("Varrow", 1), (",", 0), (" ", 0), ("17", 0.5))
