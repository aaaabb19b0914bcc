"""Verdicts: what is called clear, weak and guessing, and how often that is wrong."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stride_cli.attribution.verdict import FEWEST, NullAnswers


def nulls(losses: np.ndarray, strengths: np.ndarray) -> NullAnswers:
    return NullAnswers(np.array([1]), np.asarray(losses)[None], np.asarray(strengths)[None])


# 99 null prompts of losses 1.01 … 1.99 and strengths 1 … 99, the surest the weakest
HUNDRED = nulls(1 + np.arange(1, 100) / 100, np.arange(1.0, 100.0))


@pytest.mark.parametrize(
    ("loss", "strength", "word"),
    [
        (0.5, 200.0, "clear"),
        (1.095, 90.5, "clear"),  # nine are as sure, nine as strong: with itself ten of a hundred
        (1.095, 89.5, "weak"),
        (0.5, 1.0, "weak"),
        (1.105, 200.0, "guessing"),
        (3.0, 0.0, "guessing"),
    ],
)
def test_by_the_share_of_null_prompts_that_are_as_sure_and_as_strong(loss, strength, word: str) -> None:
    found = HUNDRED.judge(loss, strength * loss, 7)
    assert found is not None and found.word == word
    assert found.line == pytest.approx(90 * loss) and found.beyond == 0.1  # the tenth strongest
    assert found.surer == (1 + (HUNDRED.losses <= loss).sum()) / 100
    assert found.stronger == (1 + (HUNDRED.strengths >= strength).sum()) / 100
    assert found.nulls == 99


def test_where_the_surest_are_the_strongest_fewer_may_be_as_both() -> None:
    found = nulls(HUNDRED.losses[0], HUNDRED.strengths[0][::-1]).judge(0.5, 200.0, 7)
    assert (
        found is not None and found.beyond == 0.04
    )  # four null prompts are clear, and a fifth would be one more
    same = nulls(np.ones(99), np.ones(99)).judge(0.5, 9.0, 7)
    assert same is not None and same.word == "clear" and same.beyond == 0.1


@given(st.integers(0, 2**32 - 1), st.sampled_from([20, 39, 100]), st.floats(-0.9, 0.9))
def test_of_answers_to_null_prompts_at_most_five_percent_are_clear(
    seed: int, count: int, correlation: float
) -> None:
    random = np.random.default_rng(seed)
    words = []
    for _ in range(300):
        mixed = random.normal(size=(count + 1, 2)) @ np.array([[1, correlation], [0, 1.0]])
        losses, strengths = np.exp(mixed).T
        found = nulls(losses[:-1], strengths[:-1]).judge(losses[-1], strengths[-1] * losses[-1], 1)
        assert found is not None
        words.append(found.word)
    # 300 draws at .05: beyond 36 lies less than one in a million
    assert words.count("clear") <= 36
    assert 300 - words.count("guessing") <= 60  # at .1


def test_null_prompts_are_taken_at_the_answers_length_or_the_next_shorter() -> None:
    scored = np.array([1, 4, 16])
    losses = np.repeat([[3.0], [2.0], [1.0]], 20, axis=1)
    three = NullAnswers(scored, losses, np.ones((3, 20)))
    for count, expected in ((1, 3.0), (3, 3.0), (4, 2.0), (15, 2.0), (16, 1.0), (900, 1.0)):
        below = three.judge(expected - 0.1, 9.0, count)
        above = three.judge(expected + 0.1, 9.0, count)
        assert below is not None and below.word == "clear"
        assert above is not None and above.word == "guessing"


def test_a_model_of_short_responses_is_judged_by_those() -> None:
    losses = np.repeat([[3.0], [2.0], [np.nan]], 20, axis=1)
    short = NullAnswers(np.array([1, 4, 16]), losses, np.ones((3, 20)))
    below, above = short.judge(1.9, 9.0, 16), short.judge(2.1, 9.0, 16)
    assert below is not None and below.word == "clear" and above is not None and above.word == "guessing"
    assert short.median_loss == 2.0
    assert np.isnan(NullAnswers(np.array([1]), losses[2:], losses[2:]).median_loss)


def test_responses_that_are_shorter_count_nothing_and_too_few_give_no_verdict() -> None:
    losses = np.linspace(1, 2, 30)
    short = np.where(np.arange(30) < 30 - FEWEST, np.nan, losses)
    assert nulls(short, short).judge(0.5, 9.0, 1).nulls == FEWEST
    fewer = np.where(np.arange(30) <= 30 - FEWEST, np.nan, losses)
    assert nulls(fewer, fewer).judge(0.5, 9.0, 1) is None
