"""Null prompts: prompts about which no corpus says anything, where the right answer is "nothing".

Their greedy continuations are what the model falls back on, often a sentence that it knows by heart. R² is
high there, too. What tells them apart: the model is unsure of its response, and no document is strong beside
the loss.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

import numpy as np

from stride_cli.corpus.forms import Form
from stride_cli.data.queries import Query, form_of, prompt_tokens
from stride_cli.output import progress
from stride_cli.randomness import stream

if TYPE_CHECKING:
    from stride_cli.data.workspace import Workspace
    from stride_cli.models.language.causal_lm import CausalLM

SCORED_TOKENS = 16  # of a null prompt's response
_PROMPT_TOKENS = (6, 9, 12)  # few lengths, so that many prompts are continued together
_TOGETHER = 64
_WORD = 6  # letters of a word that does not exist


def null_queries(workspace: Workspace, count: int) -> list[Query]:
    """Null prompts with the model's greedy continuations.

    A third are tokens drawn from all over the corpus, a third whole words, a third words that do not exist,
    of the corpus's letters. They are put to the model as other prompts are (`form_of`). Of an index and
    model always the same ones.

    Parameters
    ----------
    count : how many; those after which the model ends at once are left out
    """
    model = cast("CausalLM", workspace.model)
    lengths = [min(length, max(2, model.context_length // 2)) for length in _PROMPT_TOKENS]
    prompts: dict[int, list[list[int]]] = {length: [] for length in lengths}
    drawn, form = _prompts(workspace), form_of(workspace)
    before, behind = _around(model, form)
    begins = 0 if model.tokenizer.bos_token_id is None else 1
    for number in range(count):
        length = lengths[number // 3 % len(lengths)]  # each kind in each length
        while len(found := prompt_tokens(model, next(drawn))) < length:
            pass
        prompts[length].append([*before, *found[begins:length], *behind])
    queries = []
    with progress("asking unrelated prompts", count, unit="prompts") as bar:
        for group in prompts.values():
            for start in range(0, len(group), _TOGETHER):
                some = group[start : start + _TOGETHER]
                responses = model.generate_together(some, SCORED_TOKENS)
                queries += [
                    _query(model, form, *pair) for pair in zip(some, responses, strict=True) if pair[1]
                ]
                bar.advance(len(some))
    return queries


def _around(model: CausalLM, form: Form) -> tuple[list[int], list[int]]:
    """Tokens in front of a prompt, and behind it, that are the same for all prompts."""
    one, other = prompt_tokens(model, "a", form), prompt_tokens(model, "7", form)
    most = min(len(one), len(other))
    before = next((place for place in range(most) if one[place] != other[place]), most)
    behind = next((place for place in range(most - before) if one[-1 - place] != other[-1 - place]), 0)
    return one[:before], one[len(one) - behind :]


def _query(model: CausalLM, form: Form, prompt: list[int], response: list[int]) -> Query:
    weights = np.zeros(len(prompt) + len(response), np.float32)
    weights[len(prompt) :] = 1.0
    asked, said = (str(model.tokenizer.decode(ids, skip_special_tokens=True)) for ids in (prompt, response))
    return Query(asked, said, np.asarray(prompt + response, np.int64), weights, True, form)


def _prompts(workspace: Workspace) -> Iterator[str]:
    """The three kinds in turn, each longer than any prompt has to be."""
    chunks, tokenizer = workspace.chunks, workspace.model.tokenizer
    random, length = stream(workspace.seed, "null prompts"), max(_PROMPT_TOKENS)

    def decoded(ids: np.ndarray) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=True))

    def word() -> str:
        words = decoded(chunks.chunk(int(random.integers(chunks.n_chunks)))[0]).split()
        return words[int(random.integers(len(words)))] if words else ""

    while True:
        places = random.integers(len(chunks.tokens), size=2 * length)
        yield decoded(np.array([chunks.tokens[int(place)] for place in places], np.int64))
        yield " ".join(word() for _ in range(length))
        letters = [letter for letter in "".join(word() for _ in range(2 * length)) if letter.isalpha()]
        random.shuffle(letters)
        yield " ".join("".join(letters[start : start + _WORD]) for start in range(0, len(letters), _WORD))
