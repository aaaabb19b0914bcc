"""The part of a chunk that carries its influence on a query, token by token.

The operators a_k and a query's responses y point out one direction in gate space, u = Σ_k (y_k − ȳ) a_k:
towards the subsets that lower the query's loss. Steered along it, the model's loss on a chunk changes token
by token: those whose loss falls are what chunk and query have in common for the model. With operators in
closed form, a_k = F⁻¹ g(A_k) and y = A g_x, so that u ≈ F⁻¹ g_x and the changes add up to the chunk's
influence in gate space, g_i · F⁻¹ g_x, seen through K subsets.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from stride_cli.data.batches import Batch
    from stride_cli.operators.steered_model import SteeredModel

_REPLACEMENT = "\ufffd"


def token_influence(steered: SteeredModel, responses: np.ndarray, batch: Batch) -> list[np.ndarray]:
    """How much every token of some chunks has in common with a query, as far as the operators can tell.

    Parameters
    ----------
    steered : SteeredModel     with operators of K subsets
    responses : (K,) float64   the query's, as measured
    batch : Batch              the chunks

    Returns
    -------
    list of (T,) float64      per chunk; nats by which the token's loss falls per unit step along u, positive
                              where the token supports the query, 0 where it is not scored
    """
    import torch

    from stride_cli.operators.exact_response import Entrance, token_losses
    from stride_cli.operators.gates import combined_gates, mean_square_length

    model, operators = steered.model, steered.operators
    centred = np.asarray(responses, dtype=np.float32) - np.float32(np.mean(responses))
    direction = [combined_gates(gate, centred) for gate in operators.gates]
    length = np.sqrt(sum(float(part @ part) for part in direction))
    usual = np.sqrt(sum(mean_square_length(gate) for gate in operators.gates))
    # as far as exact measurement goes: small enough for differences to be first order
    step = float(operators.step) * usual / length if length > 0 else 0.0
    both_ways = [
        torch.from_numpy(np.stack([part, -part]) * np.float32(step)).to(model.device) for part in direction
    ]
    found = []
    with torch.no_grad():
        for tokens, weights in zip(batch.ids, batch.weights, strict=True):
            changes = np.zeros(len(tokens))
            scored = torch.nonzero(weights[1:]).flatten()
            if len(scored) and step > 0:
                ids = tokens[None, : int(scored[-1]) + 2].to(model.device)
                scored = scored.to(model.device)
                entrance = Entrance.of(steered, ids, scored, ids[0, scored + 1])
                towards, away = token_losses(steered, entrance, both_ways)
                changes[scored.cpu().numpy() + 1] = ((away - towards) / (2 * step)).double().cpu().numpy()
            found.append(changes)
    return found


def token_spans(tokenizer: Any, ids: np.ndarray) -> tuple[str, list[tuple[int, int]]]:
    """The text of some tokens, and where each of them stands in it: (start, stop) characters.

    A character that several tokens make together belongs to the last of them; special tokens have no text.
    """
    listed = [int(token) for token in ids]
    text = str(tokenizer.decode(listed, skip_special_tokens=True))
    pieces = [str(tokenizer.decode([token], skip_special_tokens=True)) for token in listed]
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
    (0, 0) where no value is positive
    """
    from stride_cli.recovery.passages import sentences

    if len(values) == 0 or values.max() <= 0:
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
