"""Queries: a prompt and its continuation as token ids, with the positions that are scored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from stride_cli.characters import shortened
from stride_cli.data.batches import Batch, pad_batch
from stride_cli.data.query_text import check_text
from stride_cli.errors import NumericalError, QueryError, StrideError

if TYPE_CHECKING:
    from stride_cli.data.workspace import Workspace
    from stride_cli.models.language.causal_lm import CausalLM

# how a prompt is put to the model: in the tokenizer's chat template; on a line of its own, as a corpus of
# prompts with responses is tokenised where there is no template; or as it stands, with the response behind it
Form = Literal["chat", "lines", "none"]


@dataclass(frozen=True)
class Query:
    """One thing the model said.

    Attributes
    ----------
    prompt, response : str         the response is the text whose loss is attributed
    ids : (T,) int64               prompt and response
    weights : (T,) float32         1 at the response's scored tokens, else 0
    generated : bool               True where the model wrote the response itself
    form : "chat", "lines", "none" how the prompt was put to the model
    """

    prompt: str
    response: str
    ids: np.ndarray
    weights: np.ndarray
    generated: bool
    form: Form = "none"

    def batch(self) -> Batch:
        """The query as a batch of one row."""
        return pad_batch(np.zeros(1, dtype=np.int64), [self.ids], [self.weights])


def build_query(
    model: CausalLM,
    prompt: str,
    *,
    response: str | None = None,
    span: str | None = None,
    max_new_tokens: int = 16,
    form: Form = "none",
) -> Query:
    """Tokenise a prompt and its response; without a response, the model continues greedily.

    Parameters
    ----------
    prompt : str
    response : str, optional     a given continuation; a space is put between where neither side has one
    span : str, optional         score only this part of the response (its first occurrence)
    max_new_tokens : int         length of a generated continuation
    form : see `form_of`

    Raises
    ------
    QueryError
        The prompt is empty or does not fit the context, the response is empty, or the span is not in it; a
        text that is none (see `check_text`), or of which the tokenizer makes no token.
    """
    asked = [{"prompt": prompt, "response": response, "span": span}]
    (found,) = build_queries(model, asked, max_new_tokens=max_new_tokens, form=form)
    if not isinstance(found, Query):
        raise found
    return found


def build_queries(
    model: CausalLM,
    asked: Sequence[Mapping[str, Any]],
    *,
    max_new_tokens: int = 16,
    form: Form = "none",
) -> list[Query | StrideError]:
    """`build_query` of several prompts, whose continuations are written together where they may be; in the
    place of one that cannot be asked, its error.

    Parameters
    ----------
    asked : of "prompt" and, where there are, "response" and "span"
    """
    found: list[Query | StrideError | None] = [None] * len(asked)
    begun: dict[int, list[int]] = {}  # number of a prompt → its tokens
    for number, each in enumerate(asked):
        try:
            begun[number] = _begun(model, **_texts(each), form=form)
        except (QueryError, NumericalError) as error:
            found[number] = error
    written = _written(
        model, {n: ids for n, ids in begun.items() if asked[n].get("response") is None}, max_new_tokens
    )
    for number, prompt_ids in begun.items():
        own = written.get(number)
        if isinstance(own, StrideError):
            found[number] = own
            continue
        try:
            found[number] = _finished(model, **_texts(asked[number]), form=form, ids=(prompt_ids, own))
        except (QueryError, NumericalError) as error:
            found[number] = error
    return [each for each in found if each is not None]


def _texts(asked: Mapping[str, Any]) -> dict[str, Any]:
    return {"prompt": asked["prompt"], "response": asked.get("response"), "span": asked.get("span")}


def _begun(model: CausalLM, *, prompt: str, response: str | None, span: str | None, form: Form) -> list[int]:
    """The tokens of a prompt, of which a continuation can be written where none is given."""
    for text, what in ((prompt, "prompt"), (response, "response"), (span, "span")):
        if text is not None:
            check_text(text, f"the {what}")
    if not prompt.strip():
        raise QueryError("the prompt is empty (expected some text)", fix='stride query "some text"')
    prompt_ids = prompt_tokens(model, prompt, form)
    if not prompt_ids:
        raise QueryError(
            "the model's tokenizer knows no character of the prompt",
            fix="write it in characters that it knows",
        )
    if response is None and model.context_length <= len(prompt_ids):
        raise _too_long(model, len(prompt_ids), 1)
    return prompt_ids


def _written(
    model: CausalLM, prompts: Mapping[int, list[int]], max_new_tokens: int
) -> dict[int, list[int] | StrideError]:
    """Greedy continuations by number of the prompt, or the error of one that has none."""
    if len(prompts) > 1:
        return dict(zip(prompts, model.generate_each(list(prompts.values()), max_new_tokens), strict=True))
    found: dict[int, list[int] | StrideError] = {}
    for number, ids in prompts.items():
        try:
            found[number] = list(model.generate(ids, min(max_new_tokens, model.context_length - len(ids))))
        except (QueryError, NumericalError) as error:
            found[number] = error
    return found


def _finished(
    model: CausalLM,
    *,
    prompt: str,
    response: str | None,
    span: str | None,
    form: Form,
    ids: tuple[list[int], list[int] | None],
) -> Query:
    """The query of a prompt's tokens and those of the continuation that the model wrote, if it did."""
    prompt_ids, written = ids
    generated = response is None
    if response is None:
        response_ids = written or []
        response = str(model.tokenizer.decode(response_ids, skip_special_tokens=True))
        if not response_ids:
            raise QueryError(
                "the model ends right after this prompt: there is no continuation to attribute",
                fix="give one with --response TEXT",
            )
    else:
        if not response.strip():
            raise QueryError(
                "the response is empty (expected some text)", fix="leave --response out to generate"
            )
        if form == "none" and not prompt[-1:].isspace() and not response[:1].isspace():
            response = " " + response
        response_ids = _encode(model, response)
    joined = np.asarray(prompt_ids + response_ids, dtype=np.int64)
    if len(joined) > model.context_length:
        raise _too_long(model, len(prompt_ids), len(response_ids))
    weights = np.zeros(len(joined), dtype=np.float32)
    weights[max(1, len(prompt_ids)) :] = 1.0
    if span is not None:
        weights *= _span_weights(model, prompt_ids, response_ids, response, span)
    if not weights[1:].any():
        what = "response" if span is None else "span"
        raise QueryError(
            f"the model's tokenizer knows no character of the {what}",
            fix=f"give a {what} in characters that it knows",
        )
    return Query(prompt, response, joined, weights, generated, form)


def form_of(workspace: Workspace, chat: bool | None = None) -> Form:
    """How prompts are put to a model: as the corpus of its index is, unless that is said.

    A corpus is one of prompts with responses, or conversations, where more than half of its documents are;
    where the index does not say how many are (of 0.2 and before), it is none.

    Parameters
    ----------
    chat : in the chat template, or as they stand; None: as the corpus
    """
    if workspace.model.table is not None:
        return "none"
    if chat is not None:
        return "chat" if chat else "none"
    counts = workspace.index.attributes.get("counts") or {}
    conversations, documents = (counts.get(name) for name in ("conversations", "documents"))
    if not isinstance(conversations, int) or not isinstance(documents, int):
        return "none"
    if 2 * conversations <= documents:
        return "none"
    return "chat" if getattr(workspace.model.tokenizer, "chat_template", None) else "lines"


def prompt_tokens(model: CausalLM, prompt: str, form: Form = "none") -> list[int]:
    """Token ids of a prompt, as the model is asked it."""
    start = model.tokenizer.bos_token_id
    if form == "chat":
        if not getattr(model.tokenizer, "chat_template", None):
            raise QueryError(
                "--chat needs a tokenizer with a chat template, and this model's has none",
                fix="leave --chat out",
            )
        ids = list(
            model.tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=False
            )
        )
        # a corpus has one in front of every document, whether the template writes it or not
        return ids if start is None or ids[:1] == [start] else [start, *ids]
    ids = _encode(model, f"{prompt}\n" if form == "lines" else prompt)
    return [start, *ids] if start is not None else ids


def _encode(model: CausalLM, text: str) -> list[int]:
    return list(model.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _span_weights(
    model: CausalLM, prompt_ids: list[int], response_ids: list[int], response: str, span: str
) -> np.ndarray:
    """1 at the response tokens that overlap the span's characters."""
    begin = response.find(span)
    if not span or begin < 0:
        raise QueryError(
            f"the span {shortened(repr(span), 200)} is not in the response {shortened(repr(response), 200)}",
            fix="give a part of the response verbatim",
        )
    weights = np.zeros(len(prompt_ids) + len(response_ids), dtype=np.float32)
    before = ""
    for position in range(len(response_ids)):
        text = str(model.tokenizer.decode(response_ids[: position + 1], skip_special_tokens=True))
        if len(before) < begin + len(span) and len(text) > begin:
            weights[len(prompt_ids) + position] = 1.0
        before = text
    return weights


def _too_long(model: CausalLM, prompt: int, response: int) -> QueryError:
    return QueryError(
        f"the query has {prompt} prompt and {response} response tokens; the model's context is "
        f"{model.context_length} tokens",
        fix="shorten the prompt",
    )
