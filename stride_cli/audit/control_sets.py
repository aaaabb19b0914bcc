"""Gather controls: a file of them, the items without a copy, or versions of the items (`audit.controls`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from stride_cli.audit.controls import perturbed
from stride_cli.audit.effect import measure_losses
from stride_cli.audit.ngrams import find_overlaps
from stride_cli.audit.samples import Sample, tokenize_samples
from stride_cli.errors import UsageError
from stride_cli.randomness import stream

if TYPE_CHECKING:
    from stride_cli.attribution.session import Session
    from stride_cli.audit.options import AuditOptions
    from stride_cli.corpus.documents import Document

_REFERENCES = 2  # versions of each made control
_FEWEST_SOURCES = 5  # items that controls are made from; below, of all items, also of those in the corpus
_MOST_TIMES = 4  # so many times the controls per item, where few items give the controls of all


@dataclass(frozen=True)
class Controls:
    """Controls as they are measured.

    Attributes
    ----------
    kind : "file", "absent" or "made"
    samples : list of Sample        the m that items are ranked among; empty where those are items
    owner : (m,) int64              of made ones, the item each was made from
    others : list of Sample         versions of items that are in the corpus: not controls, but what the loss
                                    of those items is compared with; `other_owner` says of which
    references : list of Sample     further versions of made controls; `reference_owner` says of which
    """

    kind: str
    samples: list[Sample]
    owner: np.ndarray
    others: list[Sample]
    other_owner: np.ndarray
    references: list[Sample]
    reference_owner: np.ndarray


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


def no_controls(kind: str) -> Controls:
    """Make no controls: items are ranked among items."""
    none = np.zeros(0, np.int64)
    return Controls(kind, [], none, [], none, [], none)


def make_controls(
    session: Session,
    documents: Sequence[Document],
    present: np.ndarray,
    options: AuditOptions,
    block_size: int,
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

    def tokenized(versions: Sequence[Document]) -> list[Sample]:
        return tokenize_samples(session.model.tokenizer, versions, block_size=block_size)

    references = [(number, each) for number, (_, _, further) in enumerate(made) for each in further]
    return Controls(
        kind="made",
        samples=tokenized([version for _, version, _ in made]),
        owner=np.array([row for row, _, _ in made], np.int64),
        others=tokenized([version for _, version in others]),
        other_owner=np.array([row for row, _ in others], np.int64),
        references=tokenized([version for _, version in references]),
        reference_owner=np.array([number for number, _ in references], np.int64),
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
    return replace(no_controls("file"), samples=list(samples), owner=np.full(len(samples), -1, np.int64))


def steepness(
    session: Session, losses: np.ndarray, against: Controls, n_items: int
) -> tuple[np.ndarray, np.ndarray]:
    """Compute D of items and made controls (see `audit.controls`), and the mean loss of each item's versions.

    0 and NaN for an item that no version could be made of: nothing is known.
    """
    found = measure_losses(session.model, [*against.others, *against.references], "losses of controls")
    versions = np.concatenate([losses[n_items:], found[: len(against.others)]])
    owner = np.concatenate([against.owner, against.other_owner])
    steepness = np.concatenate(
        [
            _mean_by(owner, log_losses(versions), n_items),
            _mean_by(against.reference_owner, log_losses(found[len(against.others) :]), len(against.samples)),
        ]
    ) - log_losses(losses)
    return np.nan_to_num(steepness, nan=0.0), _mean_by(owner, versions, n_items)


def _mean_by(owner: np.ndarray, values: np.ndarray, count: int) -> np.ndarray:
    """Average the values of each owner, (count,); NaN for one without any."""
    sizes = np.bincount(owner, minlength=count)
    sums = np.bincount(owner, weights=values, minlength=count)
    return np.where(sizes > 0, sums / np.maximum(sizes, 1), np.nan)


def log_losses(losses: np.ndarray) -> np.ndarray:
    return np.log(np.maximum(losses, 1e-9))
