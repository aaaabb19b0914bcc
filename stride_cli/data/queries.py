"""Queries: a prompt and its continuation as token ids, with the positions that are scored."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from stride_cli.characters import check_text, shortened
from stride_cli.corpus.chunking import DocumentTokenizer
from stride_cli.corpus.documents import Document, type_name
from stride_cli.corpus.forms import PLAIN, Form, joiner, template_of
from stride_cli.data.batches import Batch, pad_batch
from stride_cli.errors import CorpusError, NumericalError, QueryError, StrideError
from stride_cli.output import note

if TYPE_CHECKING:
    from stride_cli.data.workspace import Workspace
    from stride_cli.models.language.causal_lm import CausalLM
    from stride_cli.models.length_kinds import LengthKinds


@dataclass(frozen=True)
class Part:
    """One of the sequences whose losses a query's is the weighted sum of.

    Attributes
    ----------
    ids : (T,) int64
    weights : (T,) float32      1 at its scored tokens, else 0
    share : float               of its mean loss; negative: of what the response is compared with
    """

    ids: np.ndarray
    weights: np.ndarray
    share: float


@dataclass(frozen=True)
class Comparison:
    """The token that a response is compared with, where the two part.

    Attributes
    ----------
    response : str           what might have been said
    token, other : str       the first token in which they differ: the response's, and the other's
    """

    response: str
    token: str
    other: str


@dataclass(frozen=True)
class Query:
    """One thing the model said.

    Attributes
    ----------
    prompt, response : str         the response is the text whose loss is attributed
    ids : (T,) int64               prompt and response
    weights : (T,) float32         0 … 1 of the response's scored tokens, by how much each counts; else 0
    generated : bool               True where the model wrote the response itself
    cut : bool                     True where it may go on writing, and is in the middle of a sentence
    form : Form                    how prompt and response became one text
    parts : of Part                what its loss is made of; none: it is one sequence, `ids`
    comparison : Comparison        with what else might have been said, or None
    count : int                    prompts that are asked as one; theirs are a line each
    whole : (T,) float32 or None   weights of the whole response, where only a part of it is scored
    losses : (S,) float64 or None  of the whole response's tokens by the model, nats, where measured
    """

    prompt: str
    response: str
    ids: np.ndarray
    weights: np.ndarray
    generated: bool
    form: Form = PLAIN
    parts: tuple[Part, ...] = ()
    comparison: Comparison | None = None
    count: int = 1
    cut: bool = False
    whole: np.ndarray | None = None
    losses: np.ndarray | None = None

    @property
    def alike(self) -> bool:
        """True where all scored tokens count alike."""
        weights = self.weights[self.weights > 0]
        return bool((weights == weights[:1]).all())

    @property
    def of_response(self) -> np.ndarray:
        """Weights of the whole response, (T,) float32, whatever part of it is scored."""
        return self.weights if self.whole is None else self.whole

    @property
    def sequences(self) -> tuple[Part, ...]:
        """The sequences over which its loss is a weighted sum: its parts, or itself alone."""
        return self.parts or (Part(self.ids, self.weights, 1.0),)

    def batch(self) -> Batch:
        """The query as a batch: of one row, or of one for each of its parts."""
        if not self.parts:
            return pad_batch(np.zeros(1, dtype=np.int64), [self.ids], [self.weights])
        rows = np.zeros(len(self.parts), dtype=np.int64)
        padded = pad_batch(rows, [part.ids for part in self.parts], [part.weights for part in self.parts])
        return replace(padded, parts=np.array([[part.share for part in self.parts]], np.float32))


def compared(query: Query, other: Query, said: Callable[[int], str], end: int | None = None) -> Query:
    """Why the model said one thing rather than another: the log-odds of the token in which they part.

        log p(response's token) − log p(other's token),  in nats

    Up to there the two are the same; from there on the model reads what it has decided for.

    Parameters
    ----------
    query, other : after the same prompt
    said : a token in words
    end : token that ends a response; where one is the beginning of the other, that is what it has there

    Raises
    ------
    QueryError      they do not differ, or one is the beginning of the other and there is no such token
    """
    ids, others = query.ids, other.ids
    shared = min(len(ids), len(others))
    differ = np.flatnonzero(ids[:shared] != others[:shared])
    if not len(differ):
        if len(ids) == len(others) or end is None:
            raise QueryError(
                "there is no token in which the response and what it is compared with differ",
                fix="give --instead something that the model did not say",
            )
        ids, others = (np.append(each, end) if len(each) == shared else each for each in (ids, others))
    place = int(differ[0]) if len(differ) else shared
    weights = np.zeros(place + 1, np.float32)
    weights[place] = 1.0
    own, rest = ids[: place + 1], others[: place + 1]
    scored = np.zeros(len(ids), np.float32)
    scored[place] = 1.0
    return replace(
        query,
        ids=ids,
        weights=scored,
        parts=(Part(own, weights, 1.0), Part(rest, weights, -1.0)),
        comparison=Comparison(other.response, said(int(own[place])), said(int(rest[place]))),
    )


def pooled(queries: Sequence[Query], kinds: LengthKinds | None = None) -> Query:
    """Several queries as one, whose loss is the mean of theirs: what made the model answer all of them so.

    Parameters
    ----------
    queries : one or more, in order
    kinds : of the model that reads them

    Raises
    ------
    QueryError      the model cannot read them in one batch as it reads each alone
    """
    lengths = [len(part.ids) for query in queries for part in query.sequences]
    if kinds is not None and len(set(kinds(lengths))) > 1:
        raise QueryError(
            f"prompts of {min(lengths)} to {max(lengths)} tokens are pooled, and this model's positions are "
            f"others beyond {kinds.boundary}",
            fix=f"pool prompts of up to {kinds.boundary} tokens with their responses, and longer ones apart",
        )
    shares = [replace(part, share=part.share / len(queries)) for query in queries for part in query.sequences]
    plain = np.mean([np.nan if query.losses is None else query.losses.mean() for query in queries])
    return Query(
        "\n".join(query.prompt for query in queries),
        "\n".join(query.response for query in queries),
        np.concatenate([query.ids for query in queries]),
        # a sequence's first token is not scored: no pair of tokens reaches across
        np.concatenate([query.weights for query in queries]),
        any(query.generated for query in queries),
        queries[0].form,
        tuple(shares),
        count=sum(query.count for query in queries),
        losses=None if np.isnan(plain) else np.array([plain]),
    )


def build_queries(
    model: CausalLM, asked: Sequence[Mapping[str, Any]], *, max_new_tokens: int = 16, form: Form = PLAIN
) -> list[Query | StrideError]:
    """Tokenise prompts and their responses, in order; in the place of one that cannot be asked, its error.

    Parameters
    ----------
    asked : of "prompt" and, where there are, "messages" in its place (of a conversation, whose next turn is
        asked for); "response", a given continuation; "span", the part of it that is scored, where it occurs
        first; "instead" (`compared`). Prompt and response are one text: a token that holds the end of the
        prompt counts as response. Without a response, the model continues greedily
    max_new_tokens : length of a continuation
    form : see `form_of`

    Errors
    ------
    QueryError
        The prompt is empty or does not fit the context, the response is empty, or the span is not in it; a
        text that is none (see `check_text`), or of which the tokenizer makes no token.
    NumericalError      the model writes what is not finite
    """
    found: dict[int, Query | StrideError] = {}
    begun: dict[int, list[int]] = {}  # number of a prompt → its tokens
    size, vocabulary = max(2, model.context_length), getattr(model, "vocab_size", None)
    cutter = DocumentTokenizer(model.tokenizer, block_size=size, form=form, vocabulary=vocabulary)
    for number, each in enumerate(asked):
        try:
            begun[number] = _begun(model, cutter, each)
        except (QueryError, NumericalError) as error:
            found[number] = error
    open_ended = [number for number in begun if asked[number].get("response") is None]
    written = model.generate_each([begun[number] for number in open_ended], max_new_tokens)
    continued = dict(zip(open_ended, written, strict=True))
    for number, prompt_ids in begun.items():
        each, own = asked[number], continued.get(number)
        try:
            if isinstance(own, StrideError):
                raise own
            if own is None:
                query = _given(model, cutter, each, each["response"])
            else:
                query = _generated(model, form, each["prompt"], prompt_ids, own)
                ended = query.response.rstrip().rstrip("\"'”’)*]")[-1:] in (*".!?…。", "")
                query = replace(query, cut=len(own) == max_new_tokens and not ended)
            if each.get("span") is not None:
                query = _narrowed(model, query, each["span"])
            if each.get("instead") is not None:
                query = _against(model, cutter, each, query)
            found[number] = query
        except (QueryError, NumericalError) as error:
            found[number] = error
    return [found[number] for number in range(len(asked))]


def _begun(model: CausalLM, cutter: DocumentTokenizer, asked: Mapping[str, Any]) -> list[int]:
    """The tokens of a prompt, after which there is room for a continuation where none is given."""
    prompt, response, form = asked["prompt"], asked.get("response"), cutter.form
    if asked.get("instead") is not None and asked.get("span") is not None:
        raise QueryError(
            "a comparison is of the first token in which two responses differ, and a span is another part of "
            "the response",
            fix="leave out the span, or what the response is compared with",
        )
    for what in ("prompt", "response", "span"):
        if (text := asked.get(what)) is not None and isinstance(text, str):
            check_text(text, f"the {what}")
        elif text is not None or what == "prompt":
            raise QueryError(f"the {what} is {type_name(text)} (expected a text)", fix='query("…")')
    if not prompt.strip():
        raise QueryError("the prompt is empty (expected some text)", fix='stride query "some text"')
    if form.label == "none" and prompt[-1].isspace():
        note("the prompt ends in white space, which the model takes as the beginning of the response")
    prompt_ids = prompt_tokens(model, prompt, form, asked.get("messages"))
    if not prompt_ids:
        raise _unknown("prompt")
    if response is None and model.context_length <= len(prompt_ids):
        raise _too_long(model, len(prompt_ids), 1)
    return prompt_ids


def _document(prompt: str, messages: Sequence[Mapping[str, Any]] | None, response: str | None) -> Document:
    """The document that a corpus would have of a query: scored on the response alone."""
    if messages is None:
        return Document("", prompt=prompt, response=response)
    turns = [{**message, "train": False} for message in messages]
    if response is not None:
        turns.append({"role": "assistant", "content": response})
    return Document("", messages=tuple(turns))


def _generated(model: CausalLM, form: Form, prompt: str, prompt_ids: list[int], written: list[int]) -> Query:
    """The query of a prompt and the continuation that the model wrote."""
    if not written:
        raise QueryError(
            "the model ends right after this prompt: there is no continuation to attribute",
            fix="give one with --response TEXT",
        )
    response = str(model.tokenizer.decode(written, skip_special_tokens=True))
    ids = np.asarray(prompt_ids + written, dtype=np.int64)
    weights = np.zeros(len(ids), dtype=np.float32)
    weights[max(1, len(prompt_ids)) :] = 1.0
    return Query(prompt, response, ids, weights, True, form)


def _given(model: CausalLM, cutter: DocumentTokenizer, asked: Mapping[str, Any], response: str) -> Query:
    """The query of a prompt and a response, as the corpus has them where it has them."""
    prompt, form = asked["prompt"], cutter.form
    if not response.strip():
        raise QueryError("the response is empty (expected some text)", fix="leave --response out to generate")
    if form.name != "chat" and form.between is None:
        response = joiner(prompt, response) + response
    try:
        (encoded,) = cutter.encode_batch([_document(prompt, asked.get("messages"), response)], ends=False)
    except CorpusError as error:
        raise QueryError(error.message.removeprefix(":0: "), fix=error.fix or "") from None
    ids, weights = encoded.tokens.astype(np.int64), encoded.scored.astype(np.float32)
    if len(ids) > model.context_length:
        raise _too_long(model, int((weights == 0).sum()), int(weights.sum()))
    if not weights.any():
        raise _unknown("response")
    return Query(prompt, response, ids, weights, False, form)


def _narrowed(model: CausalLM, query: Query, span: str) -> Query:
    """Score only the response tokens that overlap the span's characters."""
    first = int(np.argmax(query.weights > 0))

    def said(stop: int) -> str:
        return str(model.tokenizer.decode(query.ids[first:stop].tolist(), skip_special_tokens=True))

    # the tokens of a response may begin with the end of its prompt
    begin = said(len(query.ids)).find(span) if span in query.response else -1
    if not span or begin < 0:
        raise QueryError(
            f"the span {shortened(repr(span), 200)} is not in the response "
            f"{shortened(repr(query.response), 200)}",
            fix="give a part of the response verbatim",
        )
    weights = np.zeros_like(query.weights)
    before = ""
    for position in range(first, len(query.ids)):
        text = said(position + 1)
        if len(before) < begin + len(span) and len(text) > begin:
            weights[position] = query.weights[position]
        before = text
    if not weights.any():
        raise _unknown("span")
    return replace(query, weights=weights, whole=query.weights)


def _against(model: CausalLM, cutter: DocumentTokenizer, asked: Mapping[str, Any], query: Query) -> Query:
    """The query, compared with another response to its prompt."""
    instead = asked["instead"]
    check_text(instead, "what the response is compared with")
    if not instead.strip():
        raise QueryError(
            "what the response is compared with is empty (expected some text)", fix='--instead "some text"'
        )
    other = _given(model, cutter, asked, instead)
    decode, end = model.tokenizer.decode, model.tokenizer.eos_token_id
    found = compared(query, other, lambda token: str(decode([token])), end)
    if len(found.parts[0].ids) > model.context_length:  # an end was appended
        raise _too_long(model, len(found.parts[0].ids) - 1, 1)
    return found


def _unknown(what: str) -> QueryError:
    return QueryError(
        f"the model's tokenizer knows no character of the {what}", fix="use characters that it knows"
    )


def form_of(workspace: Workspace, chat: bool | None = None) -> Form:
    """Choose the form of prompts: as the corpus has it, unless one is given.

    A corpus has such prompts where more than half of its documents are pairs or conversations.

    Parameters
    ----------
    chat : True: as the corpus's prompts with responses (in the chat template, where the corpus has none of
        them); False: as they stand; None: as most of the corpus
    """
    if workspace.model.table is not None:
        return PLAIN
    tokenizer = workspace.model.tokenizer
    form = Form.recorded(workspace.index.attributes)
    if form is None or (form.name == "chat" and not template_of(tokenizer)):
        form = Form.choose(tokenizer)
    plain = replace(PLAIN, bos=form.bos)
    counts = workspace.index.attributes.get("counts") or {}
    conversations, documents = (counts.get(name) for name in ("conversations", "documents"))
    if not isinstance(conversations, int) or not isinstance(documents, int):
        conversations, documents = 0, 1
    if chat is False or (chat is None and 2 * conversations <= documents):
        return plain
    if not conversations:
        return replace(Form.choose(tokenizer), name="chat", bos=form.bos)
    return replace(form, name="concat") if form.name == "text" else form


def check_template(model: CausalLM) -> None:
    """QueryError where the model has no chat template to put a prompt in."""
    if not template_of(model.tokenizer):
        raise QueryError(
            "--chat needs a tokenizer with a chat template, and this model's has none",
            fix="leave --chat out: the corpus has no prompts with responses either",
        )


def prompt_tokens(
    model: CausalLM, prompt: str, form: Form = PLAIN, messages: Sequence[Mapping[str, Any]] | None = None
) -> list[int]:
    """Token ids of a prompt, or of messages, as the model is asked it."""
    if form.name == "chat":
        check_template(model)
    cutter = DocumentTokenizer(model.tokenizer, block_size=2, form=form)
    return cutter.prompt_tokens(_document(prompt, messages, None))


def _too_long(model: CausalLM, prompt: int, response: int) -> QueryError:
    return QueryError(
        f"the query has {prompt} prompt and {response} response tokens; the model's context is "
        f"{model.context_length} tokens",
        fix="shorten the prompt",
    )
