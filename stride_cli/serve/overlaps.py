"""Find runs of words that a document shares verbatim with a prompt and its response."""

from __future__ import annotations

import re

from stride_cli.attribution.passages import words

_WORD = re.compile(r"\w+")  # as of `passages.words`, with its place
_COMMON = (
    "a an and are as at be been but by can for from had has have he her his in into is it its not of on or "
    "she that the their there they this to was were which who will with"
)
_PARTICLES = frozenset(words(_COMMON))


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
    wanted = words(asked)
    found = [(match.group().lower(), *match.span()) for match in _WORD.finditer(text)]
    document = [word for word, _, _ in found]
    runs: list[tuple[int, int, int]] = []
    at = 0
    while at < len(document):
        # the longest run that begins here; what overlaps it is cut off it
        starts = [place for place, word in enumerate(wanted) if word == document[at]]
        length = max((_common(document, at, wanted, place) for place in starts), default=0)
        if _tells(document[at : at + length], shortest):
            runs.append((found[at][1], found[at + length - 1][2], length))
            at += length
        else:
            at += 1
    return runs


def _common(document: list[str], at: int, wanted: list[str], place: int) -> int:
    """Count the words that two lists have in common from two places on."""
    length = 0
    while document[at + length : at + length + 1] == wanted[place + length : place + length + 1] != []:
        length += 1
    return length


def _tells(run: list[str], shortest: int) -> bool:
    if len(run) >= shortest:
        return not _PARTICLES.issuperset(run)
    return any(len(word) >= 5 or word.isdigit() for word in run if word not in _PARTICLES)
