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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from stride_cli.audit.effect import measure_losses
from stride_cli.audit.ngrams import find_overlaps
from stride_cli.audit.samples import Sample, content_of, scored_parts, with_content
from stride_cli.errors import UsageError
from stride_cli.randomness import stream

if TYPE_CHECKING:
    from stride_cli.attribution.session import Session
    from stride_cli.audit.options import AuditOptions
    from stride_cli.corpus.documents import Document

WORDS_A_CHANGE = 16
_FEW_WORDS = 8  # of scored text: below, the prompt is changed as well
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
_WORD = re.compile(r"\S+")
_TRIES = 20
_REFERENCES = 2  # versions of each made control
_FEWEST_SOURCES = 5  # items that controls are made from; below, of all items, also of those in the corpus
_MOST_TIMES = 4  # so many times the controls per item, where few items give the controls of all


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


@dataclass(frozen=True)
class Controls:
    """Controls as they are measured.

    Attributes
    ----------
    kind : "file", "absent" or "made"
    samples : of Sample             the m that items are ranked among; empty where those are items
    owner : (m,) ints               of made ones, the item each was made from
    others : of Sample              versions of items that are in the corpus: not controls, but what the loss
                                    of those items is compared with; `other_owner` says of which
    references : of Sample          further versions of made controls; `reference_owner` says of which
    """

    kind: str
    samples: Sequence[Sample] = ()
    owner: Sequence[int] = ()
    others: Sequence[Sample] = ()
    other_owner: Sequence[int] = ()
    references: Sequence[Sample] = ()
    reference_owner: Sequence[int] = ()


def choose_kind(present: np.ndarray, options: AuditOptions) -> str:
    """Choose "absent" or "made", where no file is given.

    Items of which the corpus holds no copy are of the same kind as the others, and nobody changed their
    words: they are what items with a copy would be, had the model not learnt from it. So they are preferred
    where there are enough that an item's p-value can reach half the level.

    Raises
    ------
    UsageError      absent ones are asked for, and there are none
    """
    absent = int((~present).sum())
    if options.controls == "auto":
        return "absent" if (absent + 1) * options.level >= 2 else "made"
    if options.controls == "absent" and not absent:
        raise UsageError(
            f"each of the {len(present):,} items is in the corpus, so none can be a control",
            fix="give --controls FILE, items of the same kind that cannot be in the corpus",
        )
    return options.controls


def make_controls(
    session: Session,
    documents: Sequence[Document],
    present: np.ndarray,
    options: AuditOptions,
    tokenized: Callable[[Sequence[Document]], list[Sample]],
) -> Controls:
    """Make versions of each item; those of items without a copy are controls, where such are enough.

    As many controls in all as if every item gave its own, so that few items without a copy give more each.
    """
    sources = np.flatnonzero(~present)
    if len(sources) < _FEWEST_SOURCES:
        sources = np.arange(len(documents))
    wanted = options.controls_per_item
    a_source = min(_MOST_TIMES * wanted, -(-wanted * len(documents) // len(sources)))
    # versions of items with a copy are no controls, but what the losses of those items are compared with
    made: list[tuple[int, Document, list[Document]]] = []
    others: list[tuple[int, Document]] = []
    for row, document in enumerate(documents):
        is_source = bool(np.isin(row, sources))
        seen = {document.plain_text}
        for number in range(a_source if is_source else wanted):
            name = f"{document.id} (control {number + 1})"
            version = perturbed(document, name, stream(session.index.seed, "audit control", row, number))
            if version is None or version.plain_text in seen:
                continue
            seen.add(version.plain_text)
            if not is_source:
                others.append((row, version))
                continue
            streams = (
                stream(session.index.seed, "audit reference", row, number, again)
                for again in range(_REFERENCES)
            )
            further = [each for each in (perturbed(version, name, s) for s in streams) if each is not None]
            if further:
                made.append((row, version, further))
    if not made:
        raise UsageError(
            "no control can be made from these items: they are single words without a number",
            fix="give --controls FILE, items of the same kind that cannot be in the corpus",
        )

    references = [(number, each) for number, (_, _, further) in enumerate(made) for each in further]
    return Controls(
        kind="made",
        samples=tokenized([version for _, version, _ in made]),
        owner=[row for row, _, _ in made],
        others=tokenized([version for _, version in others]),
        other_owner=[row for row, _ in others],
        references=tokenized([version for _, version in references]),
        reference_owner=[number for number, _ in references],
    )


def given_controls(
    session: Session,
    documents: Sequence[Document],
    samples: Sequence[Sample],
    present: float,
) -> Controls:
    """Take the controls of a file; refuse them where one is in the corpus or in the benchmark."""
    items = {document.plain_text: document.id for document in documents}
    for control in (sample.document for sample in samples):
        if control.plain_text in items:
            raise UsageError(
                f"control '{control.id}' is the benchmark's item '{items[control.plain_text]}'",
                fix="give controls that are not in the benchmark",
            )
    overlaps = find_overlaps(session.index, [sample.parts for sample in samples])
    there = [(s.name, o) for s, o in zip(samples, overlaps, strict=True) if o.share >= present]
    if there:
        name, overlap = there[0]
        others = f", and so are {len(there) - 1} more: " + ", ".join(f"'{each}'" for each, _ in there[1:4])
        raise UsageError(
            f"control '{name}' is in the corpus ({overlap.share:.0%} of its {overlap.ngram}-grams are there, "
            f"expected less than {present:.0%}){others if len(there) > 1 else ''}",
            fix="leave such controls out: they must be items that cannot have been trained on",
        )
    return Controls("file", samples)


def steepness(
    session: Session, losses: np.ndarray, against: Controls, n_items: int
) -> tuple[np.ndarray, np.ndarray]:
    """Compute D of items and made controls (see the module), and the mean loss of each item's versions.

    0 and NaN for an item that no version could be made of: nothing is known.
    """
    found = measure_losses(session.model, [*against.others, *against.references], "losses of controls")
    versions = np.concatenate([losses[n_items:], found[: len(against.others)]])
    owner = [*against.owner, *against.other_owner]
    steepness = np.concatenate(
        [
            _mean_by(owner, log_losses(versions), n_items),
            _mean_by(against.reference_owner, log_losses(found[len(against.others) :]), len(against.samples)),
        ]
    ) - log_losses(losses)
    return np.nan_to_num(steepness, nan=0.0), _mean_by(owner, versions, n_items)


def _mean_by(owner: Sequence[int], values: np.ndarray, count: int) -> np.ndarray:
    """Average the values of each owner, (count,); NaN for one without any."""
    sizes = np.bincount(owner, minlength=count)
    sums = np.bincount(owner, weights=values, minlength=count)
    return np.where(sizes > 0, sums / np.maximum(sizes, 1), np.nan)


def log_losses(losses: np.ndarray) -> np.ndarray:
    return np.log(np.maximum(losses, 1e-9))
