"""The part of a chunk that carries its influence on a query, token by token.

Where a chunk's influence is read from its own gradient, it is g_i · g_x up to a factor, in the gates' units.
The chunk's loss is a sum over its scored tokens, and so is this product: steered along u = g_x, the loss of
each token falls by its part of it. A sentence's part is the sum over its tokens, which takes one steered pass
over the chunk, and no pass for each sentence that is left out. Of the demo's 50 prompts, with the sentences
of their documents in a random order, the one with the largest part states the answer in all 50, as does the
one whose removal changes the product most (in 40 the same one); the direction that K subsets' responses point
out finds 25, chance 20.

Of operators whose gates have no such units u is that direction, Σ_k (y_k − ȳ) a_k: towards the subsets that
lower the query's loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np

if TYPE_CHECKING:
    from stride_cli.data.batches import Batch
    from stride_cli.data.queries import Query
    from stride_cli.operators.steered_model import SteeredModel

_REPLACEMENT = "\ufffd"
_PIECES: WeakKeyDictionary[Any, dict[int, str]] = WeakKeyDictionary()  # tokenizer → token → its text
_SHARE = 0.1  # of the step of exact measurement: a query's own gradient bends losses sooner than a subset's


@dataclass(frozen=True)
class Direction:
    """Where a query pulls, in gate space.

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
    """The direction that a query's gradient has, or the subsets' responses where gates have no unit of it.

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
    """How much every token of some chunks has in common with a query: two steered passes over them all.

    Parameters
    ----------
    direction : Direction      the query's
    batch : Batch              the chunks

    Returns
    -------
    list of (T,) float64      per chunk; nats by which the token's loss falls per unit step along u, positive
                              where the token supports the query, 0 where it is not scored
    """
    import torch

    from stride_cli.operators.exact_response import token_losses_both_ways

    step, changes = direction.step, np.zeros(batch.ids.shape)
    if step > 0:
        device = steered.model.device
        gates = [torch.from_numpy(part * np.float32(step)).to(device) for part in direction.parts]
        with torch.no_grad():
            (towards, away), places = token_losses_both_ways(steered, batch, gates)
        changes.flat[places.cpu().numpy()] = ((away - towards) / (2 * step)).double().cpu().numpy()
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
    """The sentence of a chunk that carries most of its influence on a query.

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


def token_spans(tokenizer: Any, ids: np.ndarray) -> tuple[str, list[tuple[int, int]]]:
    """The text of some tokens, and where each of them stands in it: (start, stop) characters.

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
    """The sentence of a chunk whose tokens' values have the largest sum: (start, stop) characters.

    Parameters
    ----------
    text, spans : as from `token_spans`
    values : (T,) float64      of the tokens, positive where they carry what is looked for
    width : int                characters; of a longer sentence, the part that has the largest sum

    Returns
    -------
    (0, 0) where no value is positive, or one is not finite
    """
    from stride_cli.recovery.passages import sentences

    if len(values) == 0 or not np.isfinite(values).all() or values.max() <= 0:
        return 0, 0
    held = np.zeros(len(text) + 1)  # each token's value at its last character that is not a space
    for (start, stop), value in zip(spans, values, strict=True):
        piece = text[start:stop].rstrip()
        held[max(start, start + len(piece) - 1) if piece else start] += value
    total = np.concatenate([[0.0], np.cumsum(held)])
    best, at = (0, len(text)), 0
    most = -np.inf
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
