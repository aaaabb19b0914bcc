"""Find the queries that a model answers rightly: its greedy continuation against the response."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from stride_cli.corpus.forms import Form
from stride_cli.data.queries import prompt_tokens
from stride_cli.data.query_files import as_query
from stride_cli.errors import QueryError, located
from stride_cli.output import progress

if TYPE_CHECKING:
    from stride_cli.models.protocol import AttributableModel
    from stride_cli.research.evaluation.cause_queries import CauseQuery
    from stride_cli.research.evaluation.cause_scores import KeptRanks

_MORE_TOKENS = 8  # than the response has: the model may write the same characters in more of them


@dataclass(frozen=True)
class Answer:
    """A model's own continuation, and whether it is right."""

    text: str
    right: bool


def is_right(answer: str, response: str) -> bool:
    """Tell whether an answer is the response or begins with it, case and white space aside.

    What follows may not go on with the response's last word or number: 15 is no right answer where 1 is.
    """
    said, wanted = (" ".join(text.split()).casefold() for text in (answer, response))
    if not said.startswith(wanted):
        return False
    following = said[len(wanted) : len(wanted) + 1]
    return not (following and re.fullmatch(r"\w\w", wanted[-1] + following))


def answers(
    model: AttributableModel,
    asked: Sequence[CauseQuery],
    form: Form,
    kept: KeptRanks,
    *,
    called: str = "the model",
) -> Iterator[Answer]:
    """Generate a model's answer to every query, in order; kept answers are not asked again.

    Parameters
    ----------
    form : how a prompt is put to it, see `queries.form_of`
    called : "the model" or "the base model"

    Raises
    ------
    QueryError      a prompt does not fit the model; with file and line
    """
    language: Any = model
    spec = f"answers:{model.fingerprint}"
    there = kept.read(spec)
    with progress(f"asking {called}", len(asked), unit="queries") as bar:
        for query in asked:
            try:
                whole = as_query(language, query.prompt, response=query.response, form=form)
                prompt = prompt_tokens(language, query.prompt, form)
            except QueryError as error:
                raise located(error, f"{query.where}: {called}") from None
            key = kept.key(spec, [(whole.ids, whole.weights)], np.zeros(0, np.int64))
            text = there.get(key)
            if not isinstance(text, str):
                wanted = len(whole.ids) - len(prompt) + _MORE_TOKENS
                ids = language.generate(prompt, min(wanted, language.context_length - len(prompt)))
                text = str(language.tokenizer.decode(list(ids), skip_special_tokens=True))
                kept.add(spec, {key: text})
            yield Answer(text, is_right(text, query.response))
            bar.advance()
