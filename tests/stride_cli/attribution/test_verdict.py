"""Verdicts: what is called clear, weak and guessing, and how often that is wrong."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stride_cli.attribution.verdict import FEWEST, NullAnswers, strongest
from stride_cli.recovery.problem import Solution


def nulls(
    losses: np.ndarray, shares: np.ndarray, held: np.ndarray | None = None, near: int = 0
) -> NullAnswers:
    losses = np.asarray(losses, float).reshape(len(losses), -1)
    has = np.zeros(len(losses), bool) if held is None else held
    return NullAnswers(losses, np.asarray(shares), has, np.arange(len(losses)) >= len(losses) - near)


# 99 unrelated prompts of losses 1.01 … 1.99 and shares .01 … .99, the surest the weakest
HUNDRED = nulls(1 + np.arange(1, 100) / 100, np.arange(1, 100) / 100)


@pytest.mark.parametrize(
    ("loss", "share", "held", "word"),
    [
        (0.5, 0.95, True, "clear"),
        (1.095, 0.2, True, "clear"),  # nine are as sure: with itself ten of a hundred
        (0.5, 0.95, False, "weak"),
        (1.105, 0.95, True, "guessing"),
        (3.0, 0.0, False, "guessing"),
    ],
)
def test_by_the_share_of_null_prompts_that_are_as_sure_and_by_words(loss, share, held, word: str) -> None:
    found = HUNDRED.judge(np.array([loss]), share, held)
    assert found is not None and found.word == word and found.beyond == 0.1
    assert found.line == pytest.approx(min(0.9, share / 2) if held else 0.9)
    assert found.surer == (1 + (HUNDRED.losses <= loss).sum()) / 100
    assert found.stronger == (1 + (HUNDRED.shares >= share).sum()) / 100
    assert (found.nulls, found.near, found.held) == (99, 0, held)


def test_fewer_may_be_as_sure_where_null_prompts_documents_have_their_words() -> None:
    losses, shares = HUNDRED.losses[:, 0], HUNDRED.shares
    found = nulls(losses, shares, np.ones(99, bool)).judge(np.array([0.5]), 0.5, True)
    assert found is not None and found.beyond == 0.04  # a fifth would be one too many
    both = np.concatenate([losses, np.full(39, 1.055)])
    few = nulls(both, np.ones(138), np.arange(138) >= 136, near=39)
    assert few.judge(np.array([0.5]), 0.5, True).word == "clear"
    # as sure as no unrelated one, yet no clearer
    assert few.judge(np.array([1.065]), 0.5, True).word == "weak"
    assert few.judge(np.array([1.065]), 0.5, True).near == 39
    assert nulls(losses, shares, near=5).judge(np.array([0.5]), 0.95, True).word == "weak"  # 5 are few


@given(st.integers(0, 2**32 - 1), st.sampled_from([40, 78, 200]), st.floats(0, 1), st.booleans())
def test_of_answers_to_null_prompts_at_most_five_percent_are_clear(
    seed: int, count: int, has: float, near: bool
) -> None:
    random = np.random.default_rng(seed)
    words = []
    for _ in range(300):
        losses = np.exp(random.normal(size=count + 1) - near * (np.arange(count + 1) >= count // 2))
        held = random.random(count + 1) < has
        asked = nulls(losses[:-1], np.ones(count), held[:-1], near=count - count // 2)
        one = losses[-1] if near else float(np.exp(random.normal()))  # one more, of either kind
        found = asked.judge(np.array([one]), 1.0, bool(held[-1]))
        assert found is not None
        words.append(found.word)
    assert words.count("clear") <= 36  # of 300 draws at .05: beyond lies less than one in a million


@given(st.integers(0, 2**32 - 1), st.integers(1, 20))
def test_null_prompts_are_cut_to_the_answers_length_whatever_it_is(seed: int, length: int) -> None:
    random = np.random.default_rng(seed)
    losses, own = random.exponential(size=(60, 16)), random.exponential(size=length)
    fading = 0.8 ** np.arange(min(length, 16))
    starts = (losses[:, : len(fading)] * fading).sum(axis=1) / fading.sum()
    loss = (own[:16] * fading).sum() / fading.sum()
    found = nulls(losses, np.ones(60)).judge(own, 0.5, False)
    assert found is not None and found.surer == pytest.approx((1 + (starts <= loss).sum()) / 61)


def test_responses_that_are_shorter_count_nothing_and_too_few_give_no_verdict() -> None:
    losses = np.linspace(1, 2, 30)
    both = np.stack([losses, np.where(np.arange(30) < 30 - FEWEST, np.nan, losses)], axis=1)
    assert nulls(both, losses).judge(np.array([0.5, 0.5]), 0.5, True).nulls == FEWEST
    both[30 - FEWEST, 1] = np.nan  # one token of each is judged, then
    found = nulls(both, losses).judge(np.array([1.5, 0.0]), 0.5, True)
    assert found.nulls == 30 and found.surer == pytest.approx((1 + (losses <= 1.5).sum()) / 31)
    assert nulls(losses[: FEWEST - 1], losses[: FEWEST - 1]).judge(np.array([0.5]), 0.5, True) is None
    assert nulls(losses, losses).median_loss == 1.5


def test_the_strongest_are_all_with_half_of_the_first_ones_influence() -> None:
    values = np.array([0.3, 0.3, 0.29, 0.31, -0.8])  # two chunks of the first document
    for sign, documents, share in ((1, [0, 2], 0.3), (-1, [3], 0.4), (0, [], 0.0)):
        solution = Solution(np.arange(5), sign * values, *[0.0] * 9, np.zeros(3), 5)
        found, part = strongest(solution, np.array([0, 0, 1, 2, 3]))
        assert found.tolist() == documents and part == pytest.approx(share)
