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

    Attributes:
        kind: "file", "absent" or "made".
        kinds: (N,) str; how the controls of each item are put, as of `controls.Held`; "": as items are.
        sources: Texts that the controls come from.
        count: (N,) int64; controls.
        p: (N,) float64; NaN where an item cannot be tested.
        power: (N,) float64; share of items whose loss was halved that would have p ≤ level.
        losses, before, others: (N,) float64; mean nats a token of the item as it was measured, by the model
            and (or None) the one before its fine-tuning; of what it is compared with.
    """

    kind: str
    kinds: np.ndarray
    sources: int
    count: np.ndarray
    p: np.ndarray
    power: np.ndarray
    losses: np.ndarray
    before: np.ndarray | None
    others: np.ndarray


def among_controls(
    session: Session,
    kind: str,
    items: Sequence[Sample],
    kinds: np.ndarray,
    controls: Mapping[str, Sequence[Sample]],
    options: AuditOptions,
) -> Test:
    """Rank items among texts without a copy.

    Args:
        items: as `judge` measures them
        kinds: (N,) str, as of `controls.Held`; "" for items that are no copies
        controls: texts of each kind: a prompt in upper case is as steep as those are, not as whole items
    """
    n, logs, whole = len(items), _Logs(session), controls[ITEM]
    own = logs.of([*items, *whole], "losses")
    losses, before = logs.raw
    p, count = p_values(-own[:n], -own[n:]), np.full(n, len(whole))
    strength = np.full(n, power(-own[n:], options.level, _SHIFT))
    others = np.full(n, losses[n:].mean() if len(whole) else np.nan)
    for name in set(kinds) - {""}:
        rows, texts, theirs = np.flatnonzero(kinds == name), controls[name], own[n:]
        if name != ITEM:
            theirs = logs.of(texts, "losses")
            others[rows], count[rows] = logs.raw[0].mean(), len(texts)
        samples = [*(items[int(row)] for row in rows), *texts]
        known = np.concatenate([own[rows], theirs])
        steep = logs.steepness(samples, known, options.controls_per_item, 1).values
        p[rows] = p_values(steep[: len(rows)], steep[len(rows) :])
        strength[rows] = power(steep[len(rows) :], options.level, _SHIFT)
    before = None if before is None else before[:n]
    return Test(kind, kinds, len(whole), count, p, strength, losses[:n], before, others)


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
    versions = _NATURAL * further.values
    usable = ((steep.owner >= copies) | (len(sources) < FEWEST)) & np.isfinite(versions)
    p, others = np.full(n, np.nan), np.full(n, np.nan)
    p[exact] = p_values(steep.values, versions[usable])[:copies]
    others[rows] = steep.losses
    strength = np.full(n, power(versions[usable], options.level, _SHIFT))
    count, texts = np.full(n, usable.sum()), len(np.unique(steep.owner[usable]))
    kinds = np.where(exact, "versions", "")
    return Test("made", kinds, texts, count, p, strength, losses, before, others)


@dataclass(frozen=True)
class _Steep:
    """Steepness D of N samples, and mean losses of their versions; these, whose they are, and their logs."""

    values: np.ndarray
    losses: np.ndarray
    versions: list[Sample]
    owner: np.ndarray
    logs: np.ndarray


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
        """Compute D of samples with log losses `own`; NaN where no version could be made."""
        versions, owner = self.make.of(samples, count, step)
        found = self.of(versions, "losses of versions")
        sizes = np.bincount(owner, minlength=len(samples))
        sizes = np.where(sizes, sizes, np.nan)  # nothing is known of a sample without versions
        means, losses = (np.bincount(owner, each, len(samples)) / sizes for each in (found, self.raw[0]))
        return _Steep(means - own, losses, versions, owner, found)
