"""Rank items among controls: copies by how steep their losses are, items in other words by their losses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from stride_cli.audit.calibration import p_values, power
from stride_cli.audit.controls import FEWEST, REFERENCES, Versions
from stride_cli.audit.effect import measure_losses, model_before
from stride_cli.audit.presence import ITEM

if TYPE_CHECKING:
    from stride_cli.attribution.session import Session
    from stride_cli.audit.options import AuditOptions
    from stride_cli.audit.samples import Sample

_SHIFT = float(np.log(2))  # the power is that of finding an item whose loss was halved
# a first step from what a person wrote costs more than a second: 1.8 times as much on GSM8K, untrained
_NATURAL = 3.0
_SOURCES = 100  # items without a copy of which versions are made, at most


@dataclass(frozen=True)
class Test:
    """Where N items stand among controls.

    Attributes
    ----------
    kind : "file", "absent" or "made"
    sources, count : texts that the controls come from, and the controls
    p : (N,) float64        NaN where an item cannot be tested
    power : (N,) float64    share of items whose loss was halved that would have p ≤ level
    losses, before, others : (N,) float64    mean nats a token of the item as it was measured, by the model
        and (or None) the one before its fine-tuning; of what it is compared with
    """

    kind: str
    sources: int
    count: int
    p: np.ndarray
    power: np.ndarray
    losses: np.ndarray
    before: np.ndarray | None
    others: np.ndarray


def among_controls(
    session: Session,
    kind: str,
    items: Sequence[Sample],
    parts: np.ndarray,
    controls: Mapping[str, Sequence[Sample]],
    options: AuditOptions,
) -> Test:
    """Rank items among texts without a copy.

    Parameters
    ----------
    items : as `judge` measures them
    parts : (N,) str      of copies, the part that the corpus holds; "" for items that are no copies
    controls : texts for each part: a prompt is as steep as prompts are, not as whole items
    """
    n, logs, whole = len(items), _Logs(session), controls[ITEM]
    own = logs.of([*items, *whole], "losses")
    losses, before = logs.raw
    p = p_values(-own[:n], -own[n:])
    strength = np.full(n, power(-own[n:], options.level, _SHIFT))
    for part, texts in controls.items():
        rows = np.flatnonzero(parts == part)
        if not len(rows):
            continue
        theirs = own[n:] if part == ITEM else logs.of(texts, "losses")
        samples = [*(items[int(row)] for row in rows), *texts]
        known = np.concatenate([own[rows], theirs])
        steep = logs.steepness(samples, known, options.controls_per_item, 1).values
        p[rows] = p_values(steep[: len(rows)], steep[len(rows) :])
        strength[rows] = power(steep[len(rows) :], options.level, _SHIFT)
    others = np.full(n, losses[n:].mean() if len(whole) else np.nan)
    before = None if before is None else before[:n]
    return Test(kind, len(whole), len(whole), p, strength, losses[:n], before, others)


def among_versions(
    session: Session, items: Sequence[Sample], exact: np.ndarray, absent: np.ndarray, options: AuditOptions
) -> Test:
    """Rank copies among versions of items without a copy (`absent`), or, where these are few, of all."""
    n, logs = len(items), _Logs(session)
    own = logs.of(items, "losses")
    losses, before = logs.raw
    sources = np.flatnonzero(absent)[:_SOURCES]
    copies = int(exact.sum())
    rows = np.concatenate([np.flatnonzero(exact), sources])
    steep = logs.steepness([items[int(row)] for row in rows], own[rows], options.controls_per_item, 1)
    further = logs.steepness(steep.versions, steep.logs, REFERENCES, 2)
    enough = len(sources) >= FEWEST
    usable = (steep.owner >= copies) | (not enough)
    versions = _NATURAL * further.values
    p, others = np.full(n, np.nan), np.full(n, np.nan)
    known = np.bincount(steep.owner, minlength=len(rows)) > 0
    p[exact] = np.where(known, p_values(steep.values, versions[usable]), np.nan)[:copies]
    others[rows] = steep.mean_losses()
    strength = np.full(n, power(versions[usable], options.level, _SHIFT))
    count, texts = int(usable.sum()), len(np.unique(steep.owner[usable]))
    return Test("made", texts, count, p, strength, losses, before, others)


@dataclass(frozen=True)
class _Steep:
    """Steepness D of N samples; their versions, whose these are, and the versions' log losses and losses."""

    values: np.ndarray
    versions: list[Sample]
    owner: np.ndarray
    logs: np.ndarray
    losses: np.ndarray

    def mean_losses(self) -> np.ndarray:
        """Average the losses of each sample's versions, (N,); NaN for one without any."""
        return _mean_by(self.owner, self.losses, len(self.values))


class _Logs:
    """Measures log losses; of a fine-tuned model whose base is there, log loss − log loss of the base."""

    def __init__(self, session: Session) -> None:
        self.model, self.before = session.model, model_before(session)
        self.make = Versions(session.model.tokenizer, session.model.context_length, session.index.seed)
        self.raw: tuple[np.ndarray, np.ndarray | None] = np.zeros(0), None  # losses of the last call

    def of(self, samples: Sequence[Sample], doing: str) -> np.ndarray:
        """Measure samples, (S,) float64."""
        own, before = measure_losses(self.model, samples, doing), None
        if self.before is not None:
            before = measure_losses(self.before, samples, f"{doing} before the fine-tuning")
        self.raw = own, before
        logs = [np.log(np.maximum(losses, 1e-9)) for losses in (own, before) if losses is not None]
        return np.asarray(logs[0] if before is None else logs[0] - logs[1])

    def steepness(self, samples: Sequence[Sample], own: np.ndarray, count: int, step: int) -> _Steep:
        """Compute D of samples with log losses `own`; 0, nothing known, where no version could be made."""
        versions, owner = self.make.of(samples, count, step)
        found = self.of(versions, "losses of versions")
        means = _mean_by(owner, found, len(samples))
        return _Steep(np.nan_to_num(means - own), versions, owner, found, self.raw[0])


def _mean_by(owner: np.ndarray, values: np.ndarray, count: int) -> np.ndarray:
    """Average the values of each owner, (count,); NaN for one without any."""
    sizes = np.bincount(owner, minlength=count)
    sums = np.bincount(owner, weights=values, minlength=count)
    return np.where(sizes > 0, sums / np.maximum(sizes, 1), np.nan)
