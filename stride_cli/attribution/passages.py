"""Passages: the sentence of a chunk that carries its influence on a query, or the one most like the query.

Where a chunk's influence is an exact gradient's, it is g_i · g_x up to a factor, in the gates' units. The
chunk's loss is a sum over its scored tokens, and so is this product: steered along u = g_x, the loss of each
token falls by its part of it. A sentence's part is the sum over its tokens, which takes one steered pass over
the chunk, and no pass for each sentence that is left out.

Of operators whose gates have no such units u is that direction, Σ_k (y_k − ȳ) a_k: towards the subsets that
lower the query's loss.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np

from stride_cli.corpus.documents import Document
from stride_cli.corpus.forms import render_prompt

if TYPE_CHECKING:
    from stride_cli.corpus.forms import Form
    from stride_cli.data.batches import Batch
    from stride_cli.data.queries import Query
    from stride_cli.data.workspace import Workspace
    from stride_cli.operators.steered_model import SteeredModel

_REPLACEMENT = "\ufffd"
_PIECES: WeakKeyDictionary[Any, dict[int, str]] = WeakKeyDictionary()  # tokenizer → token → its text
_SHARE = 0.1  # of the step of exact measurement: a query's own gradient bends losses sooner than a subset's
WORD, _WORDS = re.compile(r"\w+"), re.compile(r"\w+|\s+|[^\w\s]+")
_SENTENCE = re.compile(r"[^.!?\n]*[.!?\n]+(?:[\"')\]]+)?|[^.!?\n]+$")


# ---- the passages of hits ----


def row_labels(workspace: Workspace, chunks: Sequence[int]) -> dict[int, str]:
    """Labels of a classifier's rows; none where the model is one of language."""
    names, index = workspace.model.classes, workspace.index
    if not names:
        return {}
    return {chunk: names[int(index.chunk_tokens(chunk)[1])] for chunk in dict.fromkeys(chunks)}


def carried_parts(
    steered: SteeredModel,
    workspace: Workspace,
    query: Query,
    responses: Any,
    chunks: Mapping[int, bool],
    batch: Batch | None = None,
) -> dict[int, Carried]:
    """Find in each chunk the sentence that carries its influence; one pass over them.

    Parameters
    ----------
    steered : SteeredModel         of the index's own model, with its operators
    responses : (C K,) float64     as measured
    chunks : number → whether its influence is positive
    batch : Batch, optional        the query's; where it remembers its gradient, that is not taken again
    """
    from stride_cli.data.batches import consecutive_groups

    own = responses[: steered.operators.n_subsets]  # of several models the index's own
    direction = direction_of(steered, query, own, batch)
    tokens = {chunk: workspace.index.chunk_tokens(chunk) for chunk in chunks}
    # long chunks with long ones: little of a batch is padding
    ordered = sorted(chunks, key=lambda chunk: len(tokens[chunk]))
    lengths, found = [len(tokens[chunk]) for chunk in ordered], {}
    most, kinds = max(1, steered.tokens_at_once // 2), steered.model.length_kinds
    for group in consecutive_groups(lengths, most, kinds):
        some = [ordered[place] for place in group]
        values = token_influence(steered, direction, workspace.chunks.batch(np.array(some)))
        for chunk, each in zip(some, values, strict=True):
            found[chunk] = carried_by(workspace.model.tokenizer, tokens[chunk], each, supports=chunks[chunk])
    return found


def template_opening(tokenizer: Any, form: Form) -> str:
    """Write what a chat template puts in front of a first prompt by itself, decoded as chunks are."""
    asked = Document("", prompt=_REPLACEMENT)
    text = render_prompt(asked, form, tokenizer).partition(_REPLACEMENT)[0] if form.name == "chat" else ""
    return str(tokenizer.decode(tokenizer.encode(text, add_special_tokens=False), skip_special_tokens=True))


def likest_passages(
    workspace: Workspace, query: Query, chunks: Sequence[int], known: Collection[int] = ()
) -> dict[int, str]:
    """Find the sentence most like the query in each chunk, but for those `known`."""
    if all(chunk in known for chunk in chunks):
        return {}
    tokenizer, tokens = workspace.model.tokenizer, workspace.index.chunk_tokens
    opening = template_opening(tokenizer, query.form)
    texts = {
        chunk: str(tokenizer.decode(tokens(chunk), skip_special_tokens=True)).removeprefix(opening)
        for chunk in dict.fromkeys(chunks)
    }
    counts = Counter(word for text in texts.values() for word in set(words(text)))
    weights = {word: rarity(count, len(texts)) for word, count in counts.items()}
    wanted = f"{query.prompt} {query.response}"
    return {chunk: best_passage(text, wanted, weights) for chunk, text in texts.items() if chunk not in known}


# ---- the sentence that carries the influence ----


@dataclass(frozen=True)
class Direction:
    """The direction of a query in gate space.

    Attributes
    ----------
    parts : of each space, (p,) float32
    step : float      so far along it losses change in proportion
    """

    parts: list[np.ndarray]
    step: float


def direction_of(
    steered: SteeredModel, query: Query, responses: np.ndarray, batch: Batch | None = None
) -> Direction:
    """Return the direction of a query's gradient, or of the subsets' responses where gates have no unit.

    Parameters
    ----------
    steered : SteeredModel     with operators of K subsets
    responses : (K,) float64   the query's, as measured
    batch : Batch, optional    the query's; where it remembers its gradient, that is not taken again
    """
    from stride_cli.operators.gates import combined_gates
    from stride_cli.operators.linear_response import gradients_with_loss

    operators, share = steered.operators, 1.0
    if operators.direct_scale is not None:
        gradients = gradients_with_loss(steered, batch or query.batch())[0]
        parts, share = [part[0].numpy() for part in gradients], _SHARE
    else:
        centred = np.asarray(responses, dtype=np.float32) - np.float32(np.mean(responses))
        parts = [combined_gates(gate, centred) for gate in operators.gates]
    length = np.sqrt(sum(float(part @ part) for part in parts))
    usual = operators.usual_length
    return Direction(parts, share * float(operators.step) * usual / length if length > 0 else 0.0)


def token_influence(steered: SteeredModel, direction: Direction, batch: Batch) -> list[np.ndarray]:
    """Measure what every token of some chunks has in common with a query: two steered passes over them all.

    Parameters
    ----------
    direction : Direction      the query's
    batch : Batch              the chunks

    Returns
    -------
    list of (T,) float64      per chunk; nats by which the token's loss falls per unit step along u, positive
                              where the token supports the query, 0 where it is not scored; as on average
                              over training where chunks' gradients are
    """
    import torch

    from stride_cli.operators.exact_response import token_losses_both_ways
    from stride_cli.operators.initial_residuals import average_residuals

    step, changes = direction.step, np.zeros(batch.ids.shape)
    if step > 0:
        device = steered.model.device
        gates = [torch.from_numpy(part * np.float32(step)).to(device) for part in direction.parts]
        with torch.no_grad():
            (towards, away), places = token_losses_both_ways(steered, batch, gates)
            falls, places = (away - towards) / (2 * step), places.cpu()
            if steered.averaged:
                before = 1.0 if batch.before is None else batch.before.flatten()[places].to(falls)
                falls = falls * average_residuals(-torch.expm1(-(away + towards) / 2), before)
        changes.flat[places.numpy()] = falls.cpu().numpy()
    return list(changes)


@dataclass(frozen=True)
class Carried:
    """A chunk's text, and the sentence of it that carries the influence.

    Attributes
    ----------
    text : str
    span : (int, int)      characters of it; (0, 0) where no token has an influence of this sign
    held : float or None   part of the influence of this sign that they hold
    """

    text: str
    span: tuple[int, int]
    held: float | None

    @property
    def passage(self) -> str:
        """The sentence, with dots where it is a part of one; empty where there is none."""
        start, stop = self.span
        if stop <= start:
            return ""
        before, behind = self.text[:start].rstrip(" "), self.text[start:stop]
        begun = bool(before) and before[-1] not in ".!?\n\"')]"
        ended = stop >= len(self.text.rstrip()) or behind[-1] in ".!?\"')]" or self.text[stop] == "\n"
        return ("…" if begun else "") + behind + ("" if ended else "…")


def carried_by(tokenizer: Any, tokens: np.ndarray, values: np.ndarray, *, supports: bool = True) -> Carried:
    """Find the sentence of a chunk that carries most of its influence on a query.

    Parameters
    ----------
    tokens : (L,)               the chunk's
    values : (T,) float64       `token_influence` of them, T ≥ L
    supports : bool             False: of the influence that opposes
    """
    text, spans = token_spans(tokenizer, tokens)
    signed = values[: len(spans)] * (1.0 if supports else -1.0)
    start, stop = carrying_span(text, spans, signed)
    if stop <= start:
        return Carried(text, (0, 0), None)
    carrying = np.maximum(signed, 0.0)
    inside = np.array([begin < stop and start < end for begin, end in spans])
    return Carried(text, (start, stop), float(carrying[inside].sum() / carrying.sum()))


def response_pieces(tokenizer: Any, query: Query) -> list[tuple[str, int | None]]:
    """Cut a query's response at its tokens.

    Returns
    -------
    list of (text, place of its token in `query.ids`); one piece without a place where the tokenizer does not
    give the response back as it was written
    """
    text, spans = token_spans(tokenizer, query.ids)
    begin = text.rfind(query.response)
    if begin < 0 or not query.response:
        return [(query.response, None)]
    stop = begin + len(query.response)
    pieces = [(text[max(start, begin) : min(end, stop)], place) for place, (start, end) in enumerate(spans)]
    return [(piece, place) for piece, place in pieces if piece]


def word_weights(tokenizer: Any, query: Query) -> tuple[tuple[str, float], ...]:
    """Cut a query's response at its words; one counts as its token that counts most, space nothing."""
    pieces = response_pieces(tokenizer, query)
    weights = [0.0 if at is None else float(query.weights[at]) for text, at in pieces for _ in text]
    found = ((match[0], weights[slice(*match.span())]) for match in _WORDS.finditer(query.response))
    return tuple((text, 0.0 if text.isspace() else max(own, default=0.0)) for text, own in found)


def token_spans(tokenizer: Any, ids: np.ndarray) -> tuple[str, list[tuple[int, int]]]:
    """Decode tokens, with the place of each in the text: (start, stop) characters.

    A character that several tokens make together belongs to the last of them; special tokens have no text.
    """
    listed = [int(token) for token in ids]
    text = str(tokenizer.decode(listed, skip_special_tokens=True))
    known = _PIECES.setdefault(tokenizer, {})
    for token in set(listed) - known.keys():
        known[token] = str(tokenizer.decode([token], skip_special_tokens=True))
    pieces = [known[token] for token in listed]
    spans, at = [], 0
    if "".join(pieces) == text:
        for piece in pieces:
            spans.append((at, at + len(piece)))
            at += len(piece)
        return text, spans
    # tokens that do not stand for themselves (parts of a character, a dropped space): by what each one adds
    for count in range(1, len(listed) + 1):
        so_far = str(tokenizer.decode(listed[:count], skip_special_tokens=True)).rstrip(_REPLACEMENT)
        stop = len(text) if count == len(listed) else max(at, min(len(so_far), len(text)))
        spans.append((at, stop))
        at = stop
    return text, spans


def carrying_span(
    text: str, spans: list[tuple[int, int]], values: np.ndarray, *, width: int = 280
) -> tuple[int, int]:
    """Find the sentence of a chunk whose tokens' values have the largest sum: (start, stop) characters.

    Parameters
    ----------
    text, spans : as from `token_spans`
    values : (T,) float64      of the tokens, positive where they carry what is looked for
    width : int                characters; of a longer sentence, the part that has the largest sum

    Returns
    -------
    (0, 0) where no sentence has a positive sum, or a value is not finite
    """
    if len(values) == 0 or not np.isfinite(values).all() or values.max() <= 0:
        return 0, 0
    held = np.zeros(len(text) + 1)  # each token's value at its last character that is not a space
    for (start, stop), value in zip(spans, values, strict=True):
        piece = text[start:stop].rstrip()
        held[max(start, start + len(piece) - 1) if piece else start] += value
    total = np.concatenate([[0.0], np.cumsum(held)])
    best, at, most = (0, 0), 0, 0.0
    for sentence in sentences(text):
        start = text.index(sentence, at)
        at = start + len(sentence)
        value = total[at] - total[start]
        if sentence.strip() and value > most:
            most, best = value, (start, at)
    start, stop = best
    if stop - start > width:
        inside = [span for span in spans if start <= span[0] < span[1] <= stop]
        start, stop = _strongest_run(inside or [(start, start + width)], total, width)
    while start < stop and text[start].isspace():
        start += 1
    while stop > start and text[stop - 1].isspace():
        stop -= 1
    return start, stop


def _strongest_run(spans: list[tuple[int, int]], total: np.ndarray, width: int) -> tuple[int, int]:
    """The run of tokens within `width` characters that holds most; of equal ones, the middle one."""
    begins, ends = np.array(spans).T
    last = np.searchsorted(ends, begins + width, side="right") - 1
    last = np.maximum(last, np.arange(len(spans)))  # a token longer than that alone
    sums = total[ends[last]] - total[begins]
    strongest = np.flatnonzero(sums >= sums.max() - 1e-9 * abs(sums.max()))
    chosen = strongest[len(strongest) // 2]
    return int(begins[chosen]), int(ends[last[chosen]])


# ---- the sentence most like the query ----


def words(text: str) -> list[str]:
    """Lower-cased words of a text, in order."""
    return WORD.findall(text.lower())


def sentences(text: str) -> list[str]:
    """The text cut after full stops, question and exclamation marks and line ends; nothing is lost."""
    return _SENTENCE.findall(text)


def rarity(count: float, documents: int) -> float:
    """Inverse document frequency of a word that is in `count` of so many: log((N + 1) / (count + ½))."""
    return math.log((documents + 1) / (count + 0.5))


def best_passage(text: str, query: str, weights: dict[str, float], *, width: int = 280) -> str:
    """The sentence of ``text`` that shares the rarest words with the query; the first, where none shares one.

    `weights` are the rarities of words, of an unknown word 1. A sentence of more than `width` characters is
    cut around its first shared word.
    """
    wanted = set(words(query))
    parts = [part.strip() for part in sentences(text) if part.strip()] or [text.strip()]
    scores = [sum(weights.get(word, 1.0) for word in wanted & set(words(part))) for part in parts]
    best = parts[max(range(len(parts)), key=scores.__getitem__)]
    return _cut(best, wanted, width)


def _cut(sentence: str, wanted: Sequence[str] | set[str], width: int) -> str:
    if len(sentence) <= width:
        return sentence
    shared = [match.start() for match in WORD.finditer(sentence) if match.group().lower() in wanted]
    start = max(0, min((shared[0] if shared else 0) - width // 4, len(sentence) - width))
    piece = sentence[start : start + width].strip()
    return ("…" if start else "") + piece + ("…" if start + width < len(sentence) else "")
