"""Numbers in words: a sentence for each regime, and no caveat where there is none to make."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stride_cli.report.explanation import caveats, explain, flags, stands_out, verdict

REGIMES = [
    (
        [0.4, 0.05],
        {},
        "One document stands out: d0 supports this response with 40%",
        "so do those of answers to nonsense",
    ),
    ([0.03, -0.4], {}, "d1 opposes this response with 40%", "so do those of answers to nonsense"),
    (
        [0.3, 0.25, -0.2],
        {},
        "3 documents stand out, d0, d1, d2 (opposing): together they hold 75%",
        "nonsense",
    ),
    ([0.02, 0.01], {}, "No document stands out", "hints only"),
    ([0.0], {"recovery__nonzeros": 0}, "No document moves this response", "Do not read anything"),
    ([0.0], {}, "None of the documents shown has any weight", "Do not read anything"),
    ([0.4], {"recovery__r_squared": 0.2}, "One document", "Trust it little: the influences explain 20%"),
    ([0.4], {"recovery__r_squared": None}, "One document", "an unknown part"),
    ([0.4], {"recovery__r_squared": 0.6}, "One document", "not the exact numbers"),
    ([0.4], {"recovery__nonzeros": 300}, "One document", "with 300 chunks to fit them"),
    ([0.4], {"measurement__agreement": 0.7}, "One document", "agrees only at r = 0.70"),
    ([0.4], {"measurement__coverage": 0.9999}, "One document", "only 99.9% of the corpus"),
    ([0.4], {"measurement__subsets": 50, "recovery__nonzeros": 9}, "One document", "so few subsets"),
    ([0.4], {"loss": 5.0}, "One document", "finds the response unlikely"),
    (
        [1.0],
        {"recovery__nonzeros": 1},
        "d0 supports this response with 100%",
        "so do those of answers to nonsense",
    ),
]


@pytest.mark.parametrize(("shares", "changes", "says", "trust"), REGIMES)
def test_each_regime_has_its_sentences(record, shares, changes, says: str, trust: str) -> None:
    text = explain(record(shares, **changes))
    assert says in text and trust in text
    assert len(re.findall(r"\.(?: |$)", text)) == 2, text


def test_a_clean_answer_has_no_caveat(record) -> None:
    assert caveats(record()) == [] and stands_out(record())


@pytest.mark.parametrize(
    ("shares", "changes", "part"),
    [
        ([0.02], {}, "Nothing stands out: no document shown holds more than 2%"),
        ([0.0], {}, "ranked by correlation alone"),
        ([0.4], {"recovery__r_squared": 0.3}, "explain only 30%"),
        ([0.4], {"measurement__coverage": 0.5}, "have seen 50% of the chunks"),
        ([0.4], {"measurement__subsets": 64, "recovery__nonzeros": 10}, "Only 64 subsets"),
        ([0.4], {"recovery__nonzeros": 380}, "380 chunks share 400 measurements"),
        ([0.4], {"measurement__agreement": 0.5}, "r = 0.50"),
        ([0.4], {"loss": 4.0}, "loss 4.0 nats a token"),
    ],
)
def test_caveats_follow_the_numbers(record, shares, changes, part: str) -> None:
    (caveat,) = caveats(record(shares, **changes))
    assert part in caveat


def test_hits_that_cannot_be_told_apart_or_were_not_seen(record) -> None:
    answer = record()
    answer["hits"][0].update(neighbours=2, seen=False)
    assert "d0 cannot be told apart from 2 other chunks" in caveats(answer)[0]
    assert "never saw d0 and d0 cannot be told apart from 2 other chunks" in explain(answer)
    assert flags(answer["hits"][0]) == ["never seen by the operators", "2 indistinguishable chunks"]
    assert flags(record([0.0])["hits"][0]) == ["by correlation only"]


@given(
    shares=st.lists(st.floats(-1, 1), max_size=6),
    nonzeros=st.integers(0, 2000),
    subsets=st.integers(1, 5000),
    numbers=st.tuples(*[st.none() | st.floats(0, 1)] * 3),
    loss=st.none() | st.floats(0, 100),
)
def test_any_numbers_can_be_put_in_words(record, shares, nonzeros, subsets, numbers, loss) -> None:
    fit, agreement, coverage = numbers
    answer = record(shares, recovery__nonzeros=nonzeros, recovery__r_squared=fit, loss=loss)
    answer["measurement"].update(subsets=subsets, agreement=agreement, coverage=coverage)
    text = explain(answer)
    assert text.endswith(".") and "None " not in text.replace("None of", "") and "nan" not in text
    assert all(caveat.endswith(".") for caveat in caveats(answer))


def test_second_opinions_are_one_more_clause(record) -> None:
    known = record()
    assert "half of the subsets" not in explain(known)
    known["reliability"] = 0.83
    known["hits"][0]["stability"] = 0.95
    said = explain(known)
    assert said.endswith(
        "; half of the subsets predict what the others answered at r = 0.83, "
        "and d0 stays on the list in 95% of such halves."
    )
    assert not caveats(known)
    known["reliability"] = 0.21
    assert "only at r = 0.21" in caveats(known)[0]
    known["hits"][0]["stability"] = None
    assert explain(known).endswith("at r = 0.21.")
    assert "Trust it little: the influences explain 93%" in explain(known)


def test_a_document_known_by_its_words_alone_says_so(record) -> None:
    hit = record([0.0])["hits"][0] | {"backfilled": False, "prior": 0.1}
    assert flags(hit) == ["by overlap only"]
    assert flags(hit | {"influence": 0.2}) == []


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("clear", "Clear: the model is surer of this response than of 91% of those to unrelated prompts"),
        ("weak", "single none of them out"),
        ("guessing", "is no source"),
    ],
)
def test_a_calibrated_answer_begins_with_its_verdict(record, word: str, says: str) -> None:
    found = record([0.4, 0.05]) | {"verdict": word, "judged": {"line": 0.1, "beyond": 0.09}}
    text = explain(found)
    assert says in text and text.startswith(word.capitalize())
    assert len(re.findall(r"\.(?: |$)", text)) == 2, text
    assert ("stands out: d0" in text) is (word == "clear")
    assert verdict(record([0.4])) == ""
