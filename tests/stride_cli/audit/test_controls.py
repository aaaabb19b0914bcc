"""Versions of samples: a step away, of the same tokens but for that, and repeatable."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import numpy as np
import pytest

from stride_cli.audit.controls import Held, Versions
from stride_cli.audit.folding import Setting
from stride_cli.audit.samples import Sample
from stride_cli.corpus.documents import Document
from stride_cli.models.language.bpe import train_bpe

PROBLEM = "Anna buys 12 pears and 7 plums. How many pieces of fruit does Anna carry home in a bag?"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    texts = [PROBLEM, PROBLEM.upper(), "so 40 and 40 make 80, as 400 is ten times 40 !"]
    return train_bpe(iter(texts * 9), vocab_size=300, context_length=64)


def sample(tokenizer: Any, text: str, scored_from: str = "") -> Sample:
    ids = [tokenizer.bos_token_id, *tokenizer(text, add_special_tokens=False)["input_ids"]]
    weights = np.ones(len(ids), np.float32)
    weights[: 1 + len(tokenizer(text[: text.find(scored_from)], add_special_tokens=False)["input_ids"])] = 0
    return Sample(Document(id="a", text=text), [np.array(ids)], [weights])


def versions(tokenizer: Any, one: Sample, count: int = 30) -> list[str]:
    made, owner = Versions(tokenizer, 120, 0).of([one], count, 1)
    assert owner.tolist() == [0] * len(made)
    for each in made:
        assert each.ids[0][0] == tokenizer.bos_token_id and len(each.ids[0]) == len(each.weights[0])
    return [tokenizer.decode(each.ids[0], skip_special_tokens=True) for each in made]


@pytest.mark.parametrize("setting", [str, str.upper, lambda text: text.replace(" ", "\u00a0")])
def test_a_step_changes_numbers_or_neighbouring_words(tokenizer: Any, setting: Any) -> None:
    text = setting(PROBLEM)
    found = versions(tokenizer, sample(tokenizer, text))
    assert len(found) >= 28 and len(set(found)) > 10  # two changes may undo each other
    for version in found:
        words, ours = text.split(), version.split()
        assert len(words) == len(ours) and version != text
        digits = sorted(map(len, re.findall(r"\d+", version)))
        assert digits == [1, 2]
        moved = Counter(words) - Counter(ours)
        assert all(re.fullmatch(r"\d+", word) for word in moved)  # else words changed places
    assert versions(tokenizer, sample(tokenizer, text)) == found


def test_the_same_number_changes_everywhere(tokenizer: Any) -> None:
    for version in versions(tokenizer, sample(tokenizer, "so 40 and 40 make 80, as 400 is ten times 40 !")):
        numbers = re.findall(r"\d+", version)
        assert len(set(numbers[:2])) == 1 and numbers.count(numbers[0]) == 3


def test_what_is_not_scored_stays_but_where_little_is(tokenizer: Any) -> None:
    text = f"so it is. {PROBLEM}"
    assert all(
        each.startswith("so it is. ") for each in versions(tokenizer, sample(tokenizer, text, " Anna"))
    )
    short = versions(tokenizer, sample(tokenizer, f"{PROBLEM} 19", " 19"))
    assert any(not each.startswith(PROBLEM) for each in short)


@pytest.mark.parametrize("text", ["word", "so so so"])
def test_nothing_to_change(tokenizer: Any, text: str) -> None:
    assert versions(tokenizer, sample(tokenizer, text)) == []


def test_a_version_ends_where_the_context_does(tokenizer: Any) -> None:
    one = sample(tokenizer, PROBLEM)
    longest = len(one.ids[0])
    made, _ = Versions(tokenizer, longest, 0).of([one], 40, 1)
    assert max(len(each.ids[0]) for each in made) == longest
    behind, owner = Versions(tokenizer, longest, 0).of([sample(tokenizer, PROBLEM[9:]), one], 40, 1)
    behind = [each for each, row in zip(behind, owner, strict=True) if row]  # drawn by its text alone
    assert all((own.ids[0] == other.ids[0]).all() for own, other in zip(made, behind, strict=True))


@pytest.mark.parametrize("case", ["upper", "lower", "title"])
@pytest.mark.parametrize("space", [" ", "\u00a0"])
def test_controls_are_put_as_the_copy(case: str, space: str) -> None:
    setting, other = Setting(case, True, space), Document(id="b", text="Who is it? It is Tom.")
    assert Setting.of(setting.put(PROBLEM)) == setting and Setting.of(PROBLEM) == Setting()
    made = Held("response", setting, 0.6).put(other, 0.6)
    assert made is not None and made.text == setting.put("It is Tom.")
    made = Held("item", None, 0.6).put(other, 0.6)
    assert made is not None and (made.prompt, made.response) == ("Who is it?", "It is Tom.")
