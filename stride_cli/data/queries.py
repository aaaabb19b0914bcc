"""Queries: a prompt and its continuation as token ids, with the positions that are scored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from stride_cli.characters import shortened
from stride_cli.data.batches import Batch, pad_batch
from stride_cli.data.query_text import check_text
from stride_cli.errors import QueryError

if TYPE_CHECKING:
    from stride_cli.models.language.causal_lm import CausalLM


@dataclass(frozen=True)
class Query:
    """One thing the model said.

    Attributes
    ----------
    prompt, response : str         the response is the text whose loss is attributed
    ids : (T,) int64               prompt and response
    weights : (T,) float32         1 at the response's scored tokens, else 0
    generated : bool               True where the model wrote the response itself
    """

    prompt: str
    response: str
    ids: np.ndarray
    weights: np.ndarray
    generated: bool

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
    chat: bool = False,
) -> Query:
    """Tokenise a prompt and its response; without a response, the model continues greedily.

    Parameters
    ----------
    prompt : str
    response : str, optional     a given continuation; a space is put between where neither side has one
    span : str, optional         score only this part of the response (its first occurrence)
    max_new_tokens : int         length of a generated continuation
    chat : bool                  format the prompt with the tokenizer's chat template

    Raises
    ------
    QueryError
        The prompt is empty or does not fit the context, the response is empty, or the span is not in it; a
        text that is none (see `check_text`), or of which the tokenizer makes no token.
    """
    for text, what in ((prompt, "prompt"), (response, "response"), (span, "span")):
        if text is not None:
            check_text(text, f"the {what}")
    if not prompt.strip():
        raise QueryError("the prompt is empty (expected some text)", fix='stride query "some text"')
    prompt_ids = prompt_tokens(model, prompt, chat)
    if not prompt_ids:
        raise QueryError(
            "the model's tokenizer knows no character of the prompt",
            fix="write it in characters that it knows",
        )
    generated = response is None
    if response is None:
        room = model.context_length - len(prompt_ids)
        if room < 1:
            raise _too_long(model, len(prompt_ids), 1)
        response_ids = list(model.generate(prompt_ids, min(max_new_tokens, room)))
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
        if not chat and not prompt[-1:].isspace() and not response[:1].isspace():
            response = " " + response
        response_ids = _encode(model, response)
    ids = np.asarray(prompt_ids + response_ids, dtype=np.int64)
    if len(ids) > model.context_length:
        raise _too_long(model, len(prompt_ids), len(response_ids))
    weights = np.zeros(len(ids), dtype=np.float32)
    weights[max(1, len(prompt_ids)) :] = 1.0
    if span is not None:
        weights *= _span_weights(model, prompt_ids, response_ids, response, span)
    if not weights[1:].any():
        what = "response" if span is None else "span"
        raise QueryError(
            f"the model's tokenizer knows no character of the {what}",
            fix=f"give a {what} in characters that it knows",
        )
    return Query(prompt, response, ids, weights, generated)


def prompt_tokens(model: CausalLM, prompt: str, chat: bool = False) -> list[int]:
    """Token ids of a prompt, as the model is asked it."""
    if chat:
        if not getattr(model.tokenizer, "chat_template", None):
            raise QueryError(
                "--chat needs a tokenizer with a chat template, and this model's has none",
                fix="leave --chat out",
            )
        return list(
            model.tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=False
            )
        )
    ids = _encode(model, prompt)
    start = model.tokenizer.bos_token_id
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
