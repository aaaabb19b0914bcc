"""Queries: a prompt and its continuation as token ids, with the positions that are scored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from stride_cli.characters import shortened
from stride_cli.data.batches import Batch, pad_batch
from stride_cli.data.query_text import check_text
from stride_cli.errors import QueryError

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
        if form == "none" and not prompt[-1:].isspace() and not response[:1].isspace():
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
    return Query(prompt, response, ids, weights, generated, form)


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
