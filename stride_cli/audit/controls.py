"""Make versions of texts that the model cannot have learnt, and choose what items are ranked among.

A version x′ of a sample x is one *step* away: one thing in about every eight words of the scored tokens is
another. A number becomes another one of as many digits (everywhere in the row), or two neighbouring words
change places. The steepness of a text is what a step costs it,

    D(x) = mean over its versions of log loss(version) − log loss(x).

A text that was memorised word for word is steep: its versions lose far more than it does. How hard, long, or
like other documents it is matters little, since its versions are so as well.

Controls are texts of the same kind that the model was not trained on, steepness and all: items without a
copy in the corpus, or those of a file, put as the corpus puts the copy. Where there are too few, versions
stand for them, with three times their steepness: a first step away from what a person wrote costs more than a
second one, learnt or not, and how much more is not known without such texts. Versions of a learnt item are
learnt by half: they hide learning, and never make any up.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any
from zlib import crc32

import numpy as np

from stride_cli.attribution.passages import token_spans
from stride_cli.audit.folding import Setting
from stride_cli.audit.presence import ITEM, PROMPT, RESPONSE, document_text
from stride_cli.audit.samples import Sample, parts_of
from stride_cli.errors import UsageError
from stride_cli.randomness import stream

if TYPE_CHECKING:
    from stride_cli.audit.options import AuditOptions
    from stride_cli.audit.presence import Copy
    from stride_cli.corpus.documents import Document
    from stride_cli.data.workspace import Workspace

FEWEST = 20  # sources of controls: with fewer, nothing is decided
WORDS_A_CHANGE = 8
_FEW_WORDS = 8  # scored: below, the words before are changed as well
REFERENCES = 3  # versions of a version
_TRIES = 20
_SENTENCE = re.compile(r"(?<=[.?!\n])\s+|(?<=[。？！])")
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")


@dataclass(frozen=True)
class _Group:
    """A word of a row with the white space before it: its tokens, whether each is scored, its text."""

    ids: tuple[int, ...]
    scored: tuple[bool, ...]
    text: str


class Versions:
    """Makes versions of samples.

    Args:
        tokenizer, longest: of the model, and the tokens of its context, at which a version ends
        seed: of the index; each version has its own stream of random numbers
    """

    def __init__(self, tokenizer: Any, longest: int, seed: int) -> None:
        self.tokenizer, self.longest, self.seed = tokenizer, longest, seed
        self._special = set(tokenizer.all_special_ids)
        self._known: dict[str, tuple[int, ...]] = {}

    def of(self, samples: Sequence[Sample], count: int, step: int) -> tuple[list[Sample], np.ndarray]:
        """Make `count` versions of each sample that differ from it; fewer where there is less to change.

        Returns:
            list of Sample, and the number of each one's own sample (V,)
        """
        made, owner = [], []
        for row, sample in enumerate(samples):
            groups = [
                self._groups(ids, weights) for ids, weights in zip(sample.ids, sample.weights, strict=True)
            ]
            own = crc32(b"".join(ids.tobytes() for ids in sample.ids))  # other items have no say in it
            for number in range(count):
                version = self._version(sample, groups, stream(self.seed, "audit version", step, own, number))
                if version is not None:
                    made.append(version)
                    owner.append(row)
        return made, np.array(owner, np.int64)

    def _version(
        self, sample: Sample, groups: Sequence[list[_Group]], generator: np.random.Generator
    ) -> Sample | None:
        ids, weights, changed = [], [], False
        for row in groups:
            other = self._changed(row, generator)
            changed |= other != row
            tokens = [token for group in other for token in group.ids][: self.longest]
            flags = [flag for group in other for flag in group.scored][: self.longest]
            ids.append(np.array(tokens, np.int64))
            weights.append(np.array(flags, np.float32))
        return Sample(sample.document, ids, weights) if changed else None

    def _changed(self, row: list[_Group], generator: np.random.Generator) -> list[_Group]:
        """Take a row one step away."""
        words = [place for place, group in enumerate(row) if group.text.strip()]
        places = [place for place in words if all(row[place].scored)]
        wanted = max(1, len(places) // WORDS_A_CHANGE)
        if len(places) < _FEW_WORDS:
            places = words
        row, done = list(row), 0
        for _ in range(_TRIES * wanted if places else 0):
            if done == wanted:
                break
            at = places[int(generator.integers(len(places)))]
            before = row[at]
            if generator.random() < 0.5 and _NUMBER.search(before.text):
                old, new = _other_number(before.text, generator)
                # \b-like guards: 12 is not a part of 512
                number = re.compile(rf"(?<!\d){re.escape(old)}(?!\d)")
                row = [self._said(g, number.sub(new, g.text)) if old in g.text else g for g in row]
            elif at + 1 in places:
                left, right = row[at].text, row[at + 1].text
                first = left[: len(left) - len(left.lstrip())] + right.strip()
                second = right[: len(right) - len(right.lstrip())] + left.strip()
                row[at], row[at + 1] = self._said(row[at], first), self._said(row[at + 1], second)
            done += row[at] != before
        return row

    def _said(self, group: _Group, text: str) -> _Group:
        """Put another text in a group's place."""
        if text == group.text:
            return group
        if text not in self._known:
            # behind a letter: some tokenizers put a space before the first word of a text
            encode = self.tokenizer.encode
            before = encode("x", add_special_tokens=False) if text[:1].isspace() else []
            ids = encode("x" + text if before else text, add_special_tokens=False)
            self._known[text] = tuple(ids[len(before) :])
        ids = self._known[text]
        return _Group(ids, (any(group.scored),) * len(ids), text)

    def _groups(self, ids: np.ndarray, weights: np.ndarray) -> list[_Group]:
        """Cut a row before the white space of each word; special tokens stand alone."""
        text, spans = token_spans(self.tokenizer, ids)
        special = [int(token) in self._special for token in ids]

        def begins(place: int) -> bool:
            first, before = spans[place][0], spans[place - 1][0]
            return before < first and text[first : first + 1].isspace() and not text[first - 1].isspace()

        starts = [
            place
            for place in range(len(ids))
            if not place or special[place] or special[place - 1] or begins(place)
        ]
        return [
            _Group(
                tuple(int(token) for token in ids[start:stop]),
                tuple(bool(weight) for weight in weights[start:stop]),
                text[spans[start][0] : spans[stop - 1][1]],
            )
            for start, stop in pairwise([*starts, len(ids)])
        ]


@dataclass(frozen=True)
class Held:
    """How the corpus holds a copy; its controls are put so.

    Attributes:
        part: ITEM, or PROMPT or RESPONSE alone
        setting: how the corpus sets its words, where the item sets them otherwise; None: as the item
        split: of an item that is one text, the share of it that stands before what counts as its response
    """

    part: str
    setting: Setting | None
    split: float

    @classmethod
    def of(cls, workspace: Workspace, sample: Sample, copy: Copy, answers: bool) -> Held:
        """Compare a copy, as `copy_sample` takes it, with its item; `answers`: these alone are trained on."""
        text, spans = document_text(workspace.index, workspace.model.tokenizer, copy.document)
        (first, last), parts = copy.span, parts_of(sample.document)
        setting, part, split = Setting.of(text[first:last]), copy.found, 0.0
        if len(parts) == 1 and part == ITEM and answers:
            split = 1 - sample.scored / sum(begin < last and first < end for begin, end in spans)
        elif len(parts) == 1 and part != ITEM:
            part = PROMPT if copy.within[0] < 1 - copy.within[1] else RESPONSE
            split = copy.within[part == PROMPT]
        if part == RESPONSE and answers:  # scored behind its prompt
            part = ITEM
        return cls(part, None if setting == Setting.of("\n".join(parts)) else setting, split)

    @property
    def kind(self) -> str:
        """Name the part that was scored, and how it is set; ITEM: whole, as the item."""
        scored = " by its end" if self.part == ITEM and self.split > 0 else ""
        return self.part + scored + (f", {self.setting.name}" if self.setting else "")

    def put(self, document: Document, split: float) -> Document | None:
        """Put another document so; None where it has no such part."""
        parts = parts_of(document)
        if len(parts) == 1 and split > 0:
            ends = (found.end() for found in _SENTENCE.finditer(parts[0]))
            at = min(ends, key=lambda end: abs(end - split * len(parts[0])), default=0)
            parts = [parts[0][:at].rstrip(), parts[0][at:]]
        if self.part != ITEM and len(parts) > 1:
            parts = parts[:1] if self.part == PROMPT else parts[1:]
        elif self.part != ITEM or not all(parts):
            return None
        parts = [self.setting.put(part) for part in parts] if self.setting else parts
        whole, pair = (parts[0], (None, None)) if len(parts) == 1 else (None, parts)
        return replace(document, text=whole, prompt=pair[0], response=pair[1], messages=None)


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


def choose_kind(absent: int, options: AuditOptions) -> str:
    """Choose "absent" or "made", where no file is given, by the number of items without a copy.

    Those are of the same kind as the others, and nobody changed their words. So they are preferred where
    there are enough that a p-value can reach half the level.

    UsageError where absent ones are asked for, and there are none.
    """
    if options.controls == "auto":
        return "absent" if (absent + 1) * options.level >= 2 else "made"
    if options.controls == "absent" and not absent:
        raise UsageError(
            "each of the items is in the corpus, so none can be a control",
            fix="give --controls FILE, items of the same kind that cannot be in the corpus",
        )
    return options.controls


def check_controls(
    documents: Sequence[Document], controls: Sequence[Document], copies: Sequence[Copy]
) -> None:
    """Refuse the controls of a file where one is in the corpus or in the benchmark."""
    items = {document.plain_text: document.id for document in documents}
    for control in controls:
        if control.plain_text in items:
            raise UsageError(
                f"control '{control.id}' is the benchmark's item '{items[control.plain_text]}'",
                fix="give controls that are not in the benchmark",
            )
    there = [(each.id, copy) for each, copy in zip(controls, copies, strict=True) if copy.found]
    if there:
        name, copy = there[0]
        more = f", and so are {len(there) - 1} more: " if len(there) > 1 else ""
        more += ", ".join(f"'{each}'" for each, _ in there[1:4])
        held = f"{copy.found}: {copy.share:.0%} of its words' sequences"
        raise UsageError(
            f"control '{name}' is in the corpus ({held}){more}",
            fix="leave such controls out: they must be items that cannot have been trained on",
        )
