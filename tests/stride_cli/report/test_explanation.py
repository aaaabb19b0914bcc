"""Numbers in words: a sentence for each regime, and no caveat where there is none to make."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stride_cli.report.explanation import (
    caveats,
    explain,
    line_at,
    score,
    verdict,
    what_scores_are,
)

HINT = "Take that for a hint"
REGIMES = [
    ([0.4, 0.05], {}, "Look at d0, which moved the model", f"{HINT}: as this index is not calibrated"),
    ([0.03, -0.4], {}, "Look at what speaks against this response, d1 (40%", "of which d0 is the first"),
    ([0.3, 0.25, -0.2], {}, "Compare d0 and d1, which support", "with d2, which opposes it"),
    ([0.3, 0.25, 0.2, 0.2, 0.2], {}, "Look at d0, d1, d2 and 2 more together", "no one of these 5"),
    ([0.02, 0.01], {}, "Name no single source", "holds only 2%"),
    ([0.0], {"recovery__nonzeros": 0}, "Conclude nothing from this list", "no document moved"),
    ([0.0], {}, "Conclude nothing from this list", "none of its documents has any weight"),
    ([0.4], {"recovery__r_squared": 0.2}, "Look at d0", f"{HINT}, and most of what was measured is left"),
    ([0.4], {"recovery__r_squared": None}, "Look at d0", "is left unexplained"),
    ([0.4], {"recovery__nonzeros": 300}, "Look at d0", "too many chunks share what was measured"),
    ([0.4], {"recovery__nonzeros": 300, "read": 300}, "Look at d0", f"{HINT}: "),
    ([0.4], {"measurement__agreement": 0.7}, "Look at d0", "exact measurement does not agree"),
    ([0.4], {"measurement__coverage": 0.9999}, "Look at d0", "only 99.9% of the corpus"),
    ([0.4], {"measurement__subsets": 50, "recovery__nonzeros": 9}, "Look at d0", "so few subsets"),
    ([0.4], {"loss": 5.0}, "Look at d0", "finds the response unlikely"),
    ([1.0], {"recovery__nonzeros": 1}, "Look at d0", "(100% of all influence)"),
]


@pytest.mark.parametrize(("shares", "changes", "says", "trust"), REGIMES)
def test_each_regime_has_its_sentences(record, shares, changes, says: str, trust: str) -> None:
    text = explain(record(shares, **changes))
    assert says in text and trust in text
    assert len(re.findall(r"\.(?: |$)", text)) == 2, text


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


def test_the_line_parts_hits_where_their_order_allows_it() -> None:
    assert line_at([True, False, False]) == 1 and line_at([False]) == 0
    assert (
        line_at([True, True]) is line_at([None, None]) is line_at([]) is line_at([True, False, True]) is None
    )


def test_scores_are_relative_until_influences_are_in_nats(record) -> None:
    assert score(0.2, 0.8, record()) == "score +25" and score(-0.8, 0.8, record()) == "score -100"
    assert score(0.2, 0.8, record(unit="nats")) == "+0.2 nats" and score(0.0, 0.0, record()) == "score +0"
    straight = what_scores_are(record(scale={"link": "linear", "slope": 2.0, "error": 0.5}))
    assert straight == "nats: forecast rise of the loss without the document, a token, ± 25%"
    ceiling = {"link": "ceiling", "slope": None, "ceiling": 8.0, "half": 0.3, "error": 0.8}
    bounded = what_scores_are(record(scale=ceiling))  # what two documents come to is not their sum
    assert "± 10%" in bounded and "without the document alone" in bounded and "nats do not" in bounded


@pytest.mark.parametrize(
    ("word", "shares", "concludes", "cannot"),
    [
        ("clear", [0.4, 0.05], "look at d0, which", "not whether the response is true"),
        ("clear", [0.3, 0.25], "look at d0 and d1 together, for no one of these 2", "Trust this as far as"),
        ("clear", [0.3, -0.25], "compare d0, which supports this response, with d1, which opposes", "Trust"),
        ("weak", [0.4, 0.05], "name no source", "from many documents together"),
        ("weak", [0.0], "no document stands out", "can be tested (stride verify-hit"),
        ("guessing", [0.4, 0.05], "do not take this response for", "d0 first, shaped its words"),
        ("guessing", [0.0], "do not take this response for", "The documents listed shaped"),
    ],
)
def test_a_calibrated_answer_says_what_to_conclude(
    record, word: str, shares: list[float], concludes: str, cannot: str
) -> None:
    found = record(shares) | {"verdict": word, "judged": {"line": 0.1, "beyond": 0.09}}
    text = explain(found)
    assert text.startswith(f"{word.capitalize()}: ") and concludes in text and cannot in text
    assert len(re.findall(r"\.(?: |$)", text)) == 2, text
    assert not re.search(r"R²|r = |λ|gap|p-value", text)
    assert verdict(found).startswith(f"{word.capitalize()}: ") and verdict(record([0.4])) == ""
