"""The passage of a chunk that a reader should look at: its sentence most like the query, by shared words."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence

_WORD = re.compile(r"\w+")
_SENTENCE = re.compile(r"[^.!?\n]*[.!?\n]+(?:[\"')\]]+)?|[^.!?\n]+$")


def words(text: str) -> list[str]:
    """Lower-cased words of a text, in order."""
    return _WORD.findall(text.lower())


def sentences(text: str) -> list[str]:
    """The text cut after full stops, question and exclamation marks and line ends; nothing is lost."""
    return _SENTENCE.findall(text)


def rarity(texts: Iterable[str]) -> dict[str, float]:
    """Inverse document frequency of every word over the given texts: log((N + 1) / (count + ½))."""
    counts: Counter[str] = Counter()
    total = 0
    for text in texts:
        total += 1
        counts.update(set(words(text)))
    return {word: math.log((total + 1) / (count + 0.5)) for word, count in counts.items()}


def best_passage(text: str, query: str, weights: dict[str, float], *, width: int = 280) -> str:
    """The sentence of ``text`` that shares the rarest words with the query, at most ``width`` characters.

    Parameters
    ----------
    text : str
    query : str
    weights : dict      rarity of words; an unknown word counts 1
    width : int         characters; a longer sentence is cut around its first shared word

    Returns
    -------
    str      the first sentence where none shares a word
    """
    wanted = set(words(query))
    parts = [part.strip() for part in sentences(text) if part.strip()] or [text.strip()]
    scores = [sum(weights.get(word, 1.0) for word in wanted & set(words(part))) for part in parts]
    best = parts[max(range(len(parts)), key=scores.__getitem__)]
    return _cut(best, wanted, width)


def matching_spans(text: str, query: str) -> list[tuple[int, int]]:
    """Where words of the query, longer than three letters, occur in ``text``: (start, stop) characters."""
    wanted = {word for word in words(query) if len(word) > 3 or word.isdigit()}
    return [match.span() for match in _WORD.finditer(text) if match.group().lower() in wanted]


def _cut(sentence: str, wanted: Sequence[str] | set[str], width: int) -> str:
    if len(sentence) <= width:
        return sentence
    shared = [match.start() for match in _WORD.finditer(sentence) if match.group().lower() in wanted]
    start = max(0, min((shared[0] if shared else 0) - width // 4, len(sentence) - width))
    piece = sentence[start : start + width].strip()
    return ("…" if start else "") + piece + ("…" if start + width < len(sentence) else "")
