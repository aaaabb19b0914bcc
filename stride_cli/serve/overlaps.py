"""Find runs of words that a document shares verbatim with a prompt and its response."""

from __future__ import annotations

import re
from collections.abc import Iterator

from stride_cli.attribution.passages import words

# as of `passages.words`, with its place
_WORD = re.compile(r"\w+")
_COMMON = (
    "a an and are as at be been but by can for from had has have he her his in into is it its not of on or"
)
_COMMON += " she that the their there they this to was were which who will with"
_PARTICLES = frozenset(_COMMON.split(" "))


def verbatim_runs(text: str, asked: str, *, shortest: int = 2) -> list[tuple[int, int, int]]:
    """Find the longest runs of words of `text` that also stand in `asked`, in the same order.

    Case and what is between words do not count. A run is one of `shortest` words or more, one of them at
    least no mere particle, or a single word of five letters or more, or a number.

    Parameters
    ----------
    text : of a document
    asked : prompt and response

    Returns
    -------
    list of (start, stop, words) of `text`: characters, and how many words; ascending, none in another
    """
    places: dict[str, list[int]] = {}
    wanted = words(asked)
    for at, word in enumerate(wanted):
        places.setdefault(word, []).append(at)
    found = [(match.group().lower(), match.start(), match.end()) for match in _WORD.finditer(text)]
    runs: list[tuple[int, int, int]] = []
    covered = 0  # words of the document up to here stand in a run already
    # longest[j]: length of the run that ends at wanted[j] and at the document's word before this one
    for last, length in _maximal([word for word, _, _ in found], places, wanted):
        first = max(last - length + 1, covered)
        inside = [found[at][0] for at in range(first, last + 1)]
        if _tells(inside, shortest):
            runs.append((found[first][1], found[last][2], len(inside)))
            covered = last + 1
    return runs


def _maximal(
    document: list[str], places: dict[str, list[int]], wanted: list[str]
) -> Iterator[tuple[int, int]]:
    """Yield where runs end in the document that no word more would lengthen: (word, words in the run)."""
    before: dict[int, int] = {}
    best_before = 0
    for at, word in enumerate(document):
        now = {place: before.get(place - 1, 0) + 1 for place in places.get(word, ())}
        best = max(now.values(), default=0)
        if best_before and best != best_before + 1:
            yield at - 1, best_before
        before, best_before = now, best
    if best_before:
        yield len(document) - 1, best_before


def _tells(run: list[str], shortest: int) -> bool:
    telling = [word for word in run if word not in _PARTICLES]
    if len(run) >= shortest:
        return bool(telling)
    return any(len(word) >= 5 or word.isdigit() for word in telling)
