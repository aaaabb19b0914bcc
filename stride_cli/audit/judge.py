"""Is the model's answer to a benchmark item tied to leaked copies? Two kinds of evidence, one verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from stride_cli.audit.bm25 import best_chunks
from stride_cli.audit.calibration import benjamini_hochberg, joint_p_values
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
_REFERENCES = 2  # versions of each made control
_FEWEST_SOURCES = 5  # items that controls are made from; below, of all items, also of those in the corpus
_MOST_TIMES = 4  # so many times --controls-per-item, where few items give the controls of all
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
    kind : "file" or "made"
    samples : list of Sample        the m that items are ranked among
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


def audit(
    session: Session,
    documents: Sequence[Document],
    controls: Sequence[Document] | None = None,
    options: AuditOptions = AuditOptions(),
) -> list[Finding]:
    """Judge every item of a benchmark.

    Lexical evidence needs the index's tokens alone. The effect on the model has two sides, each ranked among
    controls, and both have to be unusual (`calibration.joint_p_values`): the loss (against controls from a
    file, the loss itself; against made ones, what one more step away from the text costs, see
    `audit.controls`), and the share of all influence that comes from the chunks most like the item. Influence
    that is exactly zero is never evidence.

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
    found = find_overlaps(session.index, [sample.parts for sample in items])
    present = np.array([overlap.share >= options.present for overlap in found])
    if controls is None:
        against = _make_controls(session, documents, present, options, block_size)
    else:
        against = _given_controls(session, documents, controls, block_size, options.present)
    everything = [*items, *against.samples]
    overlaps = [*found, *find_overlaps(session.index, [sample.parts for sample in against.samples])]
    ranked = best_chunks(
        session.index, [np.concatenate(sample.parts) for sample in everything], max(options.top, _POOL)
    )
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
    n = len(items)
    losses = np.array([effect.loss for effect in effects])
    share = np.array([effect.candidate_share for effect in effects])
    if against.kind == "file":
        knowledge, compared = -losses, np.full(n, losses[n:].mean())
    else:
        knowledge, compared = _steepness(session, losses, against, n)
    statistics = np.stack([knowledge, share], axis=1)
    p, each = joint_p_values(statistics[:n], statistics[n:], zero_is_nothing=(False, True))
    q = benjamini_hochberg(p)
    return [
        Finding(
            document=item.document,
            verdict=verdict_of(bool(present[row]), float(q[row]), options.level),
            p=float(p[row]),
            q=float(q[row]),
            lexical=_lexical(session, item, overlaps[row], bool(present[row]), *ranked[row]),
            effect={
                "p_loss": float(each[row, 0]),
                "p_influence": float(each[row, 1]),
                **_effect(session, effects[row], len(candidates[row]), float(compared[row])),
            },
            controls={"kind": against.kind, "count": len(against.samples)},
        )
        for row, item in enumerate(items)
    ]


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
    session: Session,
    documents: Sequence[Document],
    present: np.ndarray,
    options: AuditOptions,
    block_size: int,
) -> _Controls:
    """Versions of each item. Controls are those of items without a copy, where there are such items enough.

    As many controls in all as if every item gave its own, so that few items without a copy give more each.
    """
    sources = np.flatnonzero(~present)
    if len(sources) < _FEWEST_SOURCES:
        sources = np.arange(len(documents))
    wanted = options.controls_per_item
    a_source = min(_MOST_TIMES * wanted, -(-wanted * len(documents) // len(sources)))
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
    return _Controls(
        kind="made",
        samples=tokenized([version for _, version, _ in made]),
        owner=np.array([row for row, _, _ in made], np.int64),
        others=tokenized([version for _, version in others]),
        other_owner=np.array([row for row, _ in others], np.int64),
        references=tokenized([version for _, version in references]),
        reference_owner=np.array([number for number, _ in references], np.int64),
    )


def _given_controls(
    session: Session,
    documents: Sequence[Document],
    controls: Sequence[Document],
    block_size: int,
    present: float,
) -> _Controls:
    """Controls of a file, refused where one is in the corpus or in the benchmark."""
    items = {document.plain_text: document.id for document in documents}
    for control in controls:
        if control.plain_text in items:
            raise UsageError(
                f"control '{control.id}' is the benchmark's item '{items[control.plain_text]}'",
                fix="give controls that are not in the benchmark",
            )
    samples = tokenize_samples(session.model.tokenizer, controls, block_size=block_size)
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
    none = np.zeros(0, np.int64)
    return _Controls("file", samples, np.full(len(samples), -1, np.int64), [], none, [], none)


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


def _steepness(
    session: Session, losses: np.ndarray, against: _Controls, n_items: int
) -> tuple[np.ndarray, np.ndarray]:
    """D of items and made controls (see `audit.controls`), and the mean loss of each item's versions (N,).

    0 and NaN for an item that no version could be made of: nothing is known.
    """
    extra = [*against.others, *against.references]
    found = np.empty(len(extra))
    with progress("losses of controls", len(extra), unit="texts") as bar:
        for row, loss in enumerate(measure_losses(session, extra)):
            found[row] = loss
            bar.advance()
    versions = np.concatenate([losses[n_items:], found[: len(against.others)]])
    owner = np.concatenate([against.owner, against.other_owner])
    steepness = np.concatenate(
        [
            _mean_by(owner, _log(versions), n_items),
            _mean_by(against.reference_owner, _log(found[len(against.others) :]), len(against.samples)),
        ]
    ) - _log(losses)
    return np.nan_to_num(steepness, nan=0.0), _mean_by(owner, versions, n_items)


def _mean_by(owner: np.ndarray, values: np.ndarray, count: int) -> np.ndarray:
    """Mean of the values of each owner, (count,); NaN for one without any."""
    sizes = np.bincount(owner, minlength=count)
    sums = np.bincount(owner, weights=values, minlength=count)
    return np.where(sizes > 0, sums / np.maximum(sizes, 1), np.nan)


def _log(losses: np.ndarray) -> np.ndarray:
    return np.log(np.maximum(losses, 1e-9))


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
