"""Numbers in words: a sentence for each regime, and no caveat where there is none to make."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stride_cli.attribution.frames import influence_text
from stride_cli.report.explanation import asked, caveats, explain, fewer, how_found


@given(
    shares=st.lists(st.floats(-1, 1), max_size=6),
    nonzeros=st.integers(0, 2000),
    subsets=st.integers(1, 5000),
    numbers=st.tuples(*[st.none() | st.floats(0, 1)] * 2),
    loss=st.none() | st.floats(0, 100),
)
def test_any_numbers_can_be_put_in_words(record, shares, nonzeros, subsets, numbers, loss) -> None:
    fit, coverage = numbers
    answer = record(shares, recovery__nonzeros=nonzeros, recovery__r_squared=fit, loss=loss)
    answer["measurement"].update(subsets=subsets, coverage=coverage)
    text = explain(answer)
    assert text.endswith(".") and "None " not in text.replace("None of", "") and "nan" not in text
    assert all(caveat.endswith(".") for caveat in caveats(answer))


def test_the_legend_speaks_of_what_happened(record) -> None:
    straight = how_found(record(scale={"link": "linear", "band": [[1.0, 0.5, 1.5]]}))
    assert straight.startswith(
        "nats: forecast rise of the loss without the document, a token, in brackets nine"
    )
    bounded = how_found(record(scale={"link": "ceiling"}))  # what two documents come to is not their sum
    assert "brackets" not in bounded and "without the document alone" in bounded and "nats do not" in bounded
    recall = {"top": 10, "at_least": 10, "confidence": 0.95}
    some = how_found(record(read=40, chunks=400, estimated=True, recall=recall))
    assert "; 40 chunks read from their own gradients, others estimated from" in some and "95% confid" in some
    every = how_found(record(read=400, chunks=400, estimated=True, recall=recall))
    assert every.endswith("; all 400 chunks read from their own gradients")


def test_a_sure_response_is_not_said_to_be_certain(record) -> None:
    assert "probability over 0.99 a token" in asked(record(loss=1e-4))
    assert asked(record(loss=1e-4, cut=True)).endswith("MAX_NEW_TOKENS=40") and "cut" not in asked(record())


def test_fewer_documents_than_asked_for_are_said(record) -> None:
    assert fewer(record(asked=4)) == "2 of 4 asked: no other document supports this"
    assert fewer(record(asked=2)) == fewer(record()) == fewer(record([], asked=4)) == ""


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (15.965, "+16.0"),
        (-0.0345, "-0.0345"),
        (155.2, "+155"),
        (1234.4, "+1,234"),
        (1e-7, "+1.00e-07"),
        (0, "–"),
    ],
)
def test_influences_have_three_digits_and_are_never_nought(value: float, text: str) -> None:
    assert influence_text({"influence": value}, "relative") == text
    assert influence_text({"influence": value}, "nats") == text + " nats" * bool(value)
    known = influence_text({"influence": value, "low": -0.5, "high": 20.0}, "nats")
    assert known == text + " nats (-0.5 … +20)" * bool(value)


def test_documents_below_the_line_are_not_named_beside_those_above(record) -> None:
    answer = record([0.3, 0.29, 0.28])
    assert "Look at d0, d1 and d2, which support it (87% of all influence)" in explain(answer)
    for hit, above in zip(answer["hits"], (True, True, False), strict=True):
        hit["above_line"] = above
    assert "d0 and d1, which" in explain(answer) and "d2" not in explain(answer)
    assert "d0, which supports it and d1, which opposes it" in explain(record([0.4, -0.3]))
    assert "d1" not in explain(record([0.4, 0.05])) and "no single source" in explain(record([0.05, 0.04]))


def test_where_all_chunks_were_read_measurements_moved_none_and_documents_count(record) -> None:
    answer = record([], recovery__nonzeros=0, recovery__influences=408)
    assert "Nothing is listed: no document has" in explain(answer)
    assert "Nothing is listed: none was asked for" in explain({**answer, "asked": 0})
