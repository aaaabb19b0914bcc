"""Versions of items: a step away, of the same kind, and repeatable."""

from __future__ import annotations

import re

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from stride_cli.audit.controls import perturbed
from stride_cli.corpus.documents import Document

PROBLEM = "Anna buys 12 pears and 7 plums. How many pieces of fruit does Anna carry home?"


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 10_000))
def test_a_step_changes_numbers_or_neighbouring_words(seed: int) -> None:
    version = perturbed(Document(id="a", text=PROBLEM), "b", np.random.default_rng(seed))
    assert version is not None and version.id == "b" and version.text != PROBLEM
    words, ours = PROBLEM.split(), (version.text or "").split()
    assert len(words) == len(ours)
    assert [len(number) for number in sorted(re.findall(r"\d+", version.text or ""), key=len)] == [1, 2]
    if sorted(words) != sorted(ours):  # a number was changed, and nothing else
        assert all(re.fullmatch(r"\d+", our) for word, our in zip(words, ours, strict=True) if word != our)
    else:
        assert sum(word != our for word, our in zip(words, ours, strict=True)) == 2


def test_the_same_number_changes_everywhere() -> None:
    document = Document(id="a", prompt="x", response="so 40 and 40 make 80, as 400 is ten times 40 !")
    for seed in range(40):
        version = perturbed(document, "b", np.random.default_rng(seed))
        assert version is not None and version.prompt == "x"
        numbers = re.findall(r"\d+", version.response or "")
        assert numbers[0] == numbers[1] and numbers.count(numbers[0]) == 3


def test_a_short_response_leaves_the_prompt_to_change() -> None:
    versions = [
        perturbed(Document(id="a", prompt=PROBLEM, response="19"), "b", np.random.default_rng(seed))
        for seed in range(20)
    ]
    assert all(version is not None and version.prompt != PROBLEM for version in versions)


def test_nothing_to_change() -> None:
    assert perturbed(Document(id="a", text="word"), "b", np.random.default_rng(0)) is None
    assert perturbed(Document(id="a", text="so so so"), "b", np.random.default_rng(0)) is None
