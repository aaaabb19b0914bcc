"""Numbers in words: a sentence for each regime, and no caveat where there is none to make."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stride_cli.report.explanation import (
    caveats,
    explain,
    score,
    what_scores_are,
)


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


def test_scores_are_relative_until_influences_are_in_nats(record) -> None:
    assert score(0.2, 0.8, record()) == "score +25" and score(-0.8, 0.8, record()) == "score -100"
    assert score(0.2, 0.8, record(unit="nats")) == "+0.2 nats" and score(0.0, 0.0, record()) == "score +0"
    straight = what_scores_are(record(scale={"link": "linear", "slope": 2.0, "error": 0.5}))
    assert straight == "nats: forecast rise of the loss without the document, a token, ± 25%"
    ceiling = {"link": "ceiling", "slope": None, "ceiling": 8.0, "half": 0.3, "error": 0.8}
    bounded = what_scores_are(record(scale=ceiling))  # what two documents come to is not their sum
    assert "± 10%" in bounded and "without the document alone" in bounded and "nats do not" in bounded


def test_documents_below_the_line_are_not_named_beside_those_above(record) -> None:
    answer = record([0.3, 0.29, 0.28])
    assert "d0, d1 and d2 together" in explain(answer)
    for hit, above in zip(answer["hits"], (True, True, False), strict=True):
        hit["above_line"] = above
    assert "d0 and d1 together" in explain(answer) and "d2" not in explain(answer)


def test_where_all_chunks_were_read_measurements_moved_none_and_documents_count(record) -> None:
    answer = record([], recovery__nonzeros=0, recovery__influences=408)
    assert "no document is listed" in explain(answer)
