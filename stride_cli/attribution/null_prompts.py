"""Prompts about which no corpus says anything: what answers look like where the right answer is "nothing".

Greedy continuations of such prompts are what the model falls back on, often a sentence that it knows by
heart. Halves of the operators agree on them and R² is high, since both repeat the same linear picture; that
the model is unsure of how it got there, and that no document is strong beside its loss, tells them apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from stride_cli.errors import QueryError
from stride_cli.randomness import stream

if TYPE_CHECKING:
    from stride_cli.data.queries import Query
    from stride_cli.data.workspace import Workspace

SCORED_TOKENS = 16  # of a null prompt's response
_LONGEST = 10  # words or tokens of a prompt
_TRIES = 8  # prompts drawn for each that is wanted: the model may end right after one


def null_queries(workspace: Workspace, count: int, told: Callable[[], None]) -> list[Query]:
    """Null prompts with the model's greedy continuations.

    A third are tokens drawn from all over the corpus, a third whole words, a third words that do not exist,
    of the corpus's letters. Of an index and model always the same ones.

    Parameters
    ----------
    count : how many; fewer where the model has nothing to say after most
    told : called after each
    """
    from stride_cli.data.query_files import as_query

    found: list[Query] = []
    for number, prompt in enumerate(_prompts(workspace)):
        if len(found) == count or number == _TRIES * count:
            break
        try:
            found.append(as_query(workspace.model, prompt, max_new_tokens=SCORED_TOKENS))
        except QueryError:  # nothing but spaces was drawn, or the model ends right after it
            continue
        told()
    return found


def _prompts(workspace: Workspace) -> Iterator[str]:
    chunks, tokenizer = workspace.chunks, workspace.model.tokenizer
    random = stream(workspace.seed, "null prompts")

    def decoded(ids: np.ndarray) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=True))

    def word() -> str:
        words = decoded(chunks.chunk(int(random.integers(chunks.n_chunks)))[0]).split()
        return words[int(random.integers(len(words)))] if words else ""

    while True:
        length = int(random.integers(3, _LONGEST + 1))
        places = random.integers(len(chunks.tokens), size=length)
        yield decoded(np.array([chunks.tokens[int(place)] for place in places], np.int64))
        yield " ".join(word() for _ in range(length))
        letters = [letter for letter in "".join(word() for _ in range(4 * length)) if letter.isalpha()]
        random.shuffle(letters)
        yield " ".join("".join(letters[start : start + 6]) for start in range(0, len(letters), 6))
