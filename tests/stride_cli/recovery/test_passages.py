"""Passages: nothing lost when cutting sentences, the right one chosen, spans where the words are."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stride_cli.recovery.passages import best_passage, matching_spans, rarity, sentences

TEXT = 'It rained. The Bastille fell in 1789! "So it did." Nobody knew why'


@given(st.text())
def test_sentences_lose_nothing(text: str) -> None:
    assert "".join(sentences(text)) == text


def test_the_sentence_with_the_rarest_shared_words_is_chosen() -> None:
    weights = rarity([TEXT, "It rained in the end.", "The end."])
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
