"""Make controls from the items themselves: the same text with other numbers and a few words exchanged.

An item x is compared with C versions x′, one *step* away from it, and each x′ with R versions x″, one more
step away. A step changes one thing in about every sixteen words of the scored text: a number becomes another
number of as many digits (everywhere in the item), or two neighbouring words change places. The statistic of a
text is how much one more step costs it,

    D(x) = mean over its versions of log loss(version) − log loss(x),

and D(x) is ranked among the D(x′) of all items. Where nothing was memorised the first step costs about what
the second costs: D(x) and D(x′) are then exchangeable to first order, although the versions themselves are
less natural than the item and lose more. Where x was memorised word for word, the first step costs far more
than the second.

Where they are not exchangeable:

- numbers: a model that can *compute or know* the right number loses something by the first wrong one that it
  does not lose again by the second. Free numbers (of a story, a problem's givens) are safe.
- word order: a text of a few words has few places to disturb, so that the second step partly repeats the
  first. Long texts are safe.
- an item that is present in the corpus has versions that are nearly present: their D is not a null one. They
  are controls only where fewer than five items are absent from the corpus (`audit.judge`).

`--controls FILE`, with items of the same kind that were written after the corpus, has none of these limits.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

from stride_cli.audit.samples import content_of, scored_parts, with_content

if TYPE_CHECKING:
    from stride_cli.corpus.documents import Document

WORDS_A_CHANGE = 16
_FEW_WORDS = 8  # of scored text: below, the prompt is changed as well
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
_WORD = re.compile(r"\S+")
_TRIES = 20


def perturbed(document: Document, name: str, generator: np.random.Generator) -> Document | None:
    """Take a document one step away: see the module.

    Returns
    -------
    Document called `name`; None where there is nothing to change (a single word without a number)
    """
    contents = content_of(document)
    flags = scored_parts(document)
    if sum(len(_WORD.findall(text)) for text, flag in zip(contents, flags, strict=True) if flag) < _FEW_WORDS:
        flags = [True] * len(contents)
    places = [number for number, flag in enumerate(flags) if flag]
    words = sum(len(_WORD.findall(contents[place])) for place in places)
    changed = list(contents)
    done = 0
    for _ in range(_TRIES * max(1, words // WORDS_A_CHANGE)):
        if done == max(1, words // WORDS_A_CHANGE):
            break
        # by length, so that every word is as likely to be touched
        weights = np.array([len(changed[place]) for place in places], float)
        place = places[int(generator.choice(len(places), p=weights / weights.sum()))]
        before = changed[place]
        if generator.random() < 0.5 and _NUMBER.search(before):
            old, new = _other_number(before, generator)
            # \b-like guards: 12 is not a part of 512
            pattern = re.compile(rf"(?<!\d){re.escape(old)}(?!\d)")
            changed = [pattern.sub(new, text) for text in changed]
        else:
            changed[place] = _exchange(before, generator)
        done += changed[place] != before
    if not done or changed == contents:
        return None
    return with_content(document, name, changed)


def _other_number(text: str, generator: np.random.Generator) -> tuple[str, str]:
    """Choose a number of the text, and another with as many digits in the same places."""
    numbers = _NUMBER.findall(text)
    old = str(numbers[int(generator.integers(len(numbers)))])
    leading = old[0] != "0" and len(old) > 1
    digits = [
        str(generator.integers(1 if place == 0 and leading else 0, 10)) if mark.isdigit() else mark
        for place, mark in enumerate(old)
    ]
    return old, "".join(digits)


def _exchange(text: str, generator: np.random.Generator) -> str:
    """Exchange two neighbouring words; the white space stays."""
    words = list(_WORD.finditer(text))
    if len(words) < 2:
        return text
    first = int(generator.integers(len(words) - 1))
    left, right = words[first], words[first + 1]
    between = text[left.end() : right.start()]
    return text[: left.start()] + right.group() + between + left.group() + text[right.end() :]
