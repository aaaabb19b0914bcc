"""Is the model's answer to a benchmark item tied to leaked copies? Two kinds of evidence, one verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from stride_cli.audit.bm25 import best_chunks
from stride_cli.audit.calibration import benjamini_hochberg, combined_p_values
from stride_cli.audit.controls import perturbed
from stride_cli.audit.effect import Effect, measure_effects, measure_losses
from stride_cli.audit.ngrams import Overlap, find_overlaps
from stride_cli.audit.samples import Sample, tokenize_samples
from stride_cli.errors import UsageError
from stride_cli.output import progress
from stride_cli.randomness import stream

if TYPE_CHECKING:
    from stride_cli.api import Session
    from stride_cli.corpus.documents import Document

LEAKED, PRESENT = "leaked and memorised", "present, no effect"
EFFECT, NOTHING = "effect without a copy", "no evidence"
VERDICTS = (LEAKED, PRESENT, EFFECT, NOTHING)
ENOUGH_CONTROLS = 20  # below, no p-value reaches 0.05
_REFERENCES = 2  # versions of each made control
_NEAR = 0.9  # chunks that reach this share of the best BM25 score are as good as copies of the best
_POOL = 128
_AROUND, _LONGEST_PASSAGE = 8, 96  # tokens


@dataclass(frozen=True)
class AuditOptions:
    """How a benchmark is judged.

    Attributes
    ----------
    level : float            q below which there is an effect
    present : float          share of an item's 8-grams found in the corpus from which on it is present there
                             (0.7 in PaLM: Chowdhery et al. 2022, section 8)
    top : int                chunks most like the item by BM25, whose influence is added up (and all within
                             10 % of the best score, at most 128)
    controls_per_item : int  made for each item where no file of controls is given
    lambda_ratio : float     λ / λ_max; default: as `stride query`
    """

    level: float = 0.05
    present: float = 0.7
    top: int = 20
    controls_per_item: int = 10
    lambda_ratio: float | None = None


@dataclass(frozen=True)
class Finding:
    """What was found out about one item; `to_record` is documented by `stride schema stride.audit/1`."""

    document: Document
    verdict: str
    p: float
    q: float
    lexical: dict[str, Any]
    effect: dict[str, Any]
    controls: dict[str, Any]

    def to_record(self) -> dict[str, Any]:
        return {
            "schema": "stride.audit/1",
            "item": self.document.id,
            "line": self.document.line,
            "verdict": self.verdict,
            "p": self.p,
            "q": self.q,
            "lexical": self.lexical,
            "effect": self.effect,
            "controls": self.controls,
        }


@dataclass(frozen=True)
class _Controls:
    """Controls as they are measured.

    Attributes
    ----------
    samples : list of Sample
    owner : (m,) int64              the item each was made from; -1 from a file
    references : list of Sample     further versions of made ones, `reference_owner` (r,) says of which
    """

    samples: list[Sample]
    owner: np.ndarray
    references: list[Sample]
    reference_owner: np.ndarray

    @property
    def kind(self) -> str:
        return "made" if (self.owner >= 0).any() else "file"


def audit(
    session: Session,
    documents: Sequence[Document],
    controls: Sequence[Document] | None = None,
    options: AuditOptions = AuditOptions(),
) -> list[Finding]:
    """Judge every item of a benchmark.

    Lexical evidence needs the index's tokens alone. The effect on the model is a statistic with two sides,
    ranked together among controls (`calibration.combined_p_values`): the loss (of controls from a file, the
    loss itself; of made ones, what one more step away from the text costs, see `audit.controls`), and the
    share of all influence that comes from the chunks most like the item. Influence that is exactly zero is
    never evidence.

    Parameters
    ----------
    session : Session
    documents : the benchmark's items, as from `samples.read_documents_of`
    controls : items that cannot be in the corpus; None: made from the items themselves
    options : AuditOptions

    Returns
    -------
    list of Finding, in the order of the items

    Raises
    ------
    UsageError      an empty benchmark, a control that is in the corpus or in the benchmark (names it), a
                    classifier's index, an option out of range
    QueryError      an item without a scored token
    """
    _check(session, documents, options)
    block_size = int(session.index.attributes["block_size"])
    tokenizer = session.model.tokenizer
    items = tokenize_samples(tokenizer, documents, block_size=block_size)
    if controls is None:
        against = _make_controls(session, documents, options, block_size)
    else:
        against = _given_controls(session, documents, controls, block_size)
    everything = [*items, *against.samples]
    overlaps = find_overlaps(session.index, [sample.parts for sample in everything])
    present = np.array([overlap.share >= options.present for overlap in overlaps])
    if against.kind == "file":
        _refuse_present(against.samples, overlaps[len(items) :], options.present)
    pool = max(options.top, _POOL)
    ranked = best_chunks(session.index, [np.concatenate(sample.parts) for sample in everything], pool)
    offsets = np.asarray(session.index.array("corpus/chunk_offsets"))
    candidates = [
        _candidates(overlap, chunks, scores, offsets, options.top)
        for overlap, (chunks, scores) in zip(overlaps, ranked, strict=True)
    ]
    effects = []
    with progress("influence", len(everything), unit="texts") as bar:
        for effect in measure_effects(session, everything, candidates, lambda_ratio=options.lambda_ratio):
            effects.append(effect)
            bar.advance()
    losses = np.array([effect.loss for effect in effects])
    share = np.array([effect.candidate_share for effect in effects])
    steepness = -losses if against.kind == "file" else _steepness(session, losses, against, len(items))
    statistics = np.stack([steepness, share], axis=1)
    null = _null(against, present, len(items))
    p = combined_p_values(
        statistics[: len(items)], statistics[len(items) :][null], zero_is_nothing=(False, True)
    )
    q = benjamini_hochberg(p)
    findings = []
    for row, item in enumerate(items):
        own = against.owner == row if against.kind == "made" else null
        reference = float(losses[len(items) :][own].mean()) if own.any() else float("nan")
        findings.append(
            Finding(
                document=item.document,
                verdict=verdict_of(bool(present[row]), float(q[row]), options.level),
                p=float(p[row]),
                q=float(q[row]),
                lexical=_lexical(session, item, overlaps[row], bool(present[row]), *ranked[row]),
                effect=_effect(session, effects[row], len(candidates[row]), reference),
                controls={"kind": against.kind, "count": int(null.sum())},
            )
        )
    return findings


def verdict_of(present: bool, q: float, level: float) -> str:
    """The two kinds of evidence in words."""
    if q < level:
        return LEAKED if present else EFFECT
    return PRESENT if present else NOTHING


def _check(session: Session, documents: Sequence[Document], options: AuditOptions) -> None:
    if session.is_classifier:
        raise UsageError(
            f"index '{session.index.path}' is of a classifier, and an audit compares texts",
            fix="give the index of a language model",
        )
    if not documents:
        raise UsageError("the benchmark is empty", fix='one object a line: {"id", "prompt", "response"}')
    for name, value, high in (("level", options.level, 1.0), ("present share", options.present, 1.0)):
        if not 0 < value <= high:
            raise UsageError(f"the {name} is {value:g} (expected more than 0, at most 1)")
    for name, count in (("--top", options.top), ("--controls-per-item", options.controls_per_item)):
        if count < 1:
            raise UsageError(f"{name} is {count} (expected 1 or more)")


def _make_controls(
    session: Session, documents: Sequence[Document], options: AuditOptions, block_size: int
) -> _Controls:
    """C versions of each item, and R versions of each version."""
    seed = session.index.seed
    made, owner, references, reference_owner = [], [], [], []
    for row, document in enumerate(documents):
        seen = {document.plain_text}
        for number in range(options.controls_per_item):
            version = perturbed(
                document, f"{document.id} (control {number + 1})", stream(seed, "audit control", row, number)
            )
            if version is None or version.plain_text in seen:
                continue
            further = [
                perturbed(version, version.id, stream(seed, "audit reference", row, number, again))
                for again in range(_REFERENCES)
            ]
            if any(each is None for each in further):
                continue
            seen.add(version.plain_text)
            references += [each for each in further if each is not None]
            reference_owner += [len(made)] * _REFERENCES
            made.append(version)
            owner.append(row)
    if not made:
        raise UsageError(
            "no control can be made from these items: they are single words without a number",
            fix="give --controls FILE, items of the same kind that cannot be in the corpus",
        )
    tokenizer = session.model.tokenizer
    return _Controls(
        tokenize_samples(tokenizer, made, block_size=block_size),
        np.array(owner, np.int64),
        tokenize_samples(tokenizer, references, block_size=block_size),
        np.array(reference_owner, np.int64),
    )


def _given_controls(
    session: Session, documents: Sequence[Document], controls: Sequence[Document], block_size: int
) -> _Controls:
    if not controls:
        raise UsageError("the file of controls is empty", fix="leave --controls out: they are then made")
    items = {document.plain_text: document.id for document in documents}
    for control in controls:
        if control.plain_text in items:
            raise UsageError(
                f"control '{control.id}' is the benchmark's item '{items[control.plain_text]}'",
                fix="give controls that are not in the benchmark",
            )
    samples = tokenize_samples(session.model.tokenizer, controls, block_size=block_size)
    return _Controls(samples, np.full(len(samples), -1, np.int64), [], np.zeros(0, np.int64))


def _refuse_present(controls: Sequence[Sample], overlaps: Sequence[Overlap], present: float) -> None:
    found = [
        (sample.name, overlap)
        for sample, overlap in zip(controls, overlaps, strict=True)
        if overlap.share >= present
    ]
    if not found:
        return
    name, overlap = found[0]
    others = f", and {len(found) - 1} more: " + ", ".join(f"'{each}'" for each, _ in found[1:4])
    raise UsageError(
        f"control '{name}' is in the corpus ({overlap.share:.0%} of its {overlap.ngram}-grams, expected less "
        f"than {present:.0%}{others if len(found) > 1 else ''})",
        fix="leave such controls out: they must be items that cannot have been trained on",
    )


def _candidates(
    overlap: Overlap, chunks: np.ndarray, scores: np.ndarray, offsets: np.ndarray, top: int
) -> np.ndarray:
    """The best chunks by BM25, those nearly as good, and the one of the longest shared run."""
    kept = chunks[: max(top, int((scores >= _NEAR * scores[0]).sum()))] if len(chunks) else chunks
    if overlap.token < 0:
        return kept
    return np.union1d(kept, _chunk_of(overlap.token, offsets))


def _chunk_of(token: int, offsets: np.ndarray) -> int:
    return int(np.searchsorted(offsets, token, side="right")) - 1


def _steepness(session: Session, losses: np.ndarray, against: _Controls, n_items: int) -> np.ndarray:
    """D of items and made controls: mean log loss of the versions one step away, minus the own log loss.

    0 for an item that no control could be made of: nothing is known.
    """
    log = np.log(np.maximum(losses, 1e-9))
    further = np.empty(len(against.references))
    with progress("losses of controls", len(further), unit="texts") as bar:
        for row, loss in enumerate(measure_losses(session, against.references)):
            further[row] = np.log(max(loss, 1e-9))
            bar.advance()
    found = np.zeros(len(losses))
    counts = np.bincount(against.owner, minlength=n_items)
    sums = np.bincount(against.owner, weights=log[n_items:], minlength=n_items)
    made = counts > 0
    found[:n_items][made] = sums[made] / counts[made] - log[:n_items][made]
    m = len(against.samples)
    found[n_items:] = (
        np.bincount(against.reference_owner, weights=further, minlength=m)
        / np.bincount(against.reference_owner, minlength=m)
        - log[n_items:]
    )
    return found


def _null(against: _Controls, present: np.ndarray, n_items: int) -> np.ndarray:
    """Which controls items are ranked among, (m,) bool: of made ones, those of items without a copy."""
    if against.kind == "file":
        return np.ones(len(against.samples), bool)
    absent = ~present[:n_items][against.owner] & ~present[n_items:]
    return absent if absent.sum() >= ENOUGH_CONTROLS else np.ones(len(absent), bool)


def _lexical(
    session: Session,
    item: Sample,
    overlap: Overlap,
    present: bool,
    chunks: np.ndarray,
    scores: np.ndarray,
) -> dict[str, Any]:
    from stride_cli.recovery.passages import best_passage

    index, decode = session.index, session.model.tokenizer.decode
    found: dict[str, Any] = {
        "present": present,
        "ngram": overlap.ngram,
        "ngram_share": overlap.share,
        "longest_run": overlap.longest,
        "document": "",
        "chunk": None,
        "passage": "",
        "bm25_document": "",
        "bm25_chunk": None,
        "bm25_score": 0.0,
        "bm25_passage": "",
    }
    if overlap.token >= 0:
        offsets = np.asarray(index.array("corpus/chunk_offsets"))
        chunk = _chunk_of(overlap.token, offsets)
        document = int(index.chunk_documents(np.array([chunk]))[0])
        held = index.document_chunks(document)
        low = max(int(offsets[held.start]), overlap.token - _AROUND)
        stop = overlap.token + min(overlap.longest, _LONGEST_PASSAGE) + _AROUND
        high = min(int(offsets[held.stop]), stop)
        tokens = np.asarray(index.array("corpus/tokens")[low:high])
        passage = str(decode(tokens, skip_special_tokens=True)).strip()
        found |= {"document": index.document_id(document), "chunk": chunk, "passage": passage}
    if len(chunks):
        chunk = int(chunks[0])
        document = int(index.chunk_documents(chunks[:1])[0])
        text = str(decode(index.chunk_tokens(chunk), skip_special_tokens=True))
        found |= {
            "bm25_document": index.document_id(document),
            "bm25_chunk": chunk,
            "bm25_score": float(scores[0]),
            "bm25_passage": best_passage(text, item.document.plain_text, {}),
        }
    return found


def _effect(session: Session, effect: Effect, n_candidates: int, control_loss: float) -> dict[str, Any]:
    strongest = ""
    if effect.strongest_chunk >= 0:
        document = int(session.index.chunk_documents(np.array([effect.strongest_chunk]))[0])
        strongest = session.index.document_id(document)
    return {
        "loss": effect.loss,
        "control_loss": control_loss,
        "loss_gap": control_loss - effect.loss,
        "candidates": n_candidates,
        "candidate_influence": effect.candidate_influence,
        "candidate_share": effect.candidate_share,
        "strongest_document": strongest,
        "strongest_chunk": effect.strongest_chunk if effect.strongest_chunk >= 0 else None,
        "strongest_influence": effect.strongest_influence,
        "strongest_share": effect.strongest_share,
        "strongest_is_candidate": effect.strongest_is_candidate,
    }
