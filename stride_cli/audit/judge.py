"""Is the model's answer to a benchmark item tied to leaked copies? Two kinds of evidence, one verdict."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from stride_cli.audit.bm25 import Ranked, best_chunks
from stride_cli.audit.calibration import grouped_q_values, joint_p_values, leave_one_out_p_values
from stride_cli.audit.control_sets import (
    Controls,
    choose_kind,
    given_controls,
    log_losses,
    make_controls,
    no_controls,
    steepness,
)
from stride_cli.audit.effect import Candidates, Effect, losses_before, measure_effects, share_effects
from stride_cli.audit.ngrams import Overlap, find_overlaps, most_contained
from stride_cli.audit.options import AuditOptions
from stride_cli.audit.samples import Rejected, Sample, read_documents_of, tokenize_samples
from stride_cli.errors import UsageError
from stride_cli.models.kinds import refuse_classifier
from stride_cli.output import progress

if TYPE_CHECKING:
    from stride_cli.attribution.options import SharingOptions
    from stride_cli.attribution.session import Session
    from stride_cli.corpus.documents import Document
    from stride_cli.corpus.readers import ReadOptions
    from stride_cli.data.workspace import WorkspacePath
    from stride_cli.schema.audit_records import AuditRecord, ControlsRecord, EffectRecord, LexicalEvidence

    Shared = tuple[WorkspacePath, SharingOptions]

LEAKED, PRESENT = "leaked and learnt", "present, no effect"
EFFECT, NOTHING = "effect without a copy", "no evidence"
CONTROLS_IN_WORDS = {
    "file": "from a file",
    "absent": "the items that are not in the corpus",
    "made": "made from the items",
}
VERDICTS = (LEAKED, PRESENT, EFFECT, NOTHING)
_NEAR = 0.9  # chunks that reach this share of the best BM25 score are as good as copies of the best
_UNUSUAL = 1.5  # times the containment of the median item: what items of a benchmark share by their form
_POOL = 128
_AROUND, _LONGEST_PASSAGE = 8, 96  # tokens


@dataclass(frozen=True)
class Finding:
    """What was found out about one item; `to_record` is documented by `stride schema stride.audit/1`."""

    document: Document
    verdict: str
    p: float
    q: float
    lexical: LexicalEvidence
    effect: EffectRecord
    controls: ControlsRecord

    def to_record(self) -> AuditRecord:
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


def audit_files(
    open_session: Callable[[], Session],
    benchmark: str,
    controls: str | None,
    options: AuditOptions,
    reading: ReadOptions,
    rejected: Rejected | None = None,
    shared: Shared | None = None,
) -> tuple[Session, list[Finding]]:
    """`audit` of a file of items, perhaps against one of controls; both are read before the model is loaded.

    Parameters
    ----------
    rejected : callable, optional
        Takes every item, or control, that cannot be used: its error, file, line and id. Default: the first
        one's error is raised, or it is as `reading` says.
    shared : see `audit`

    Raises
    ------
    CorpusError      a file cannot be read, or has an item without a prompt or text
    and what `audit` raises
    """
    documents = read_documents_of(benchmark, reading, rejected)
    against = None if controls is None else read_documents_of(controls, reading, rejected)
    session = open_session()
    return session, audit(session, documents, against, options, rejected, shared)


def audit(
    session: Session,
    documents: Sequence[Document],
    controls: Sequence[Document] | None = None,
    options: AuditOptions = AuditOptions(),
    rejected: Rejected | None = None,
    shared: Shared | None = None,
) -> list[Finding]:
    """Judge every item of a benchmark.

    Lexical evidence needs the index's tokens alone: an item is there where it is present word for word (most
    of its n-grams), or near (one chunk holds many of its 3-grams, as a version in other words does). The
    effect on the model has two sides, each ranked among controls, and both have to be unusual
    (`calibration.joint_p_values`): the loss (where the model before a fine-tuning is at hand, how much of its
    loss went; against made controls, what a further step away costs, see `audit.controls`), and the share of
    all influence that comes from the chunks most like the item, each counted by its likeness: a control has
    chunks like it as well, such as many copies of the one leaked item that it
    resembles. Influence that is exactly zero is never evidence. The rate of false discoveries is held among
    the items that are there, and among those that are not, each by itself.

    Parameters
    ----------
    session : Session
    documents : the benchmark's items, as from `samples.read_documents_of`
    controls : items that cannot be in the corpus; None: as the options say
    options : AuditOptions
    rejected : see `audit_files`; without it a QueryError is raised
    shared : who measures effects, and where they open the index; None: this process

    Returns
    -------
    list of Finding, in the order of the items

    Raises
    ------
    UsageError      an empty benchmark, a control that is in the corpus or in the benchmark (names it), no
                    item that is absent where those are to be controls, a classifier's index
    QueryError      an item without a scored token
    """
    _check(session, documents)
    block_size = int(session.index.attributes["block_size"])
    tokenizer = session.model.tokenizer
    items = tokenize_samples(tokenizer, documents, block_size=block_size, rejected=rejected)
    documents = [item.document for item in items]
    _check(session, documents)
    found = find_overlaps(session.index, [sample.parts for sample in items])
    present = np.array([overlap.share >= options.present for overlap in found])
    ranked = best_chunks(
        session.index, [np.concatenate(sample.parts) for sample in items], max(options.top, _POOL)
    )
    alike = [
        most_contained(session.index, item.parts, like.chunks[: options.top])
        for item, like in zip(items, ranked, strict=True)
    ]
    contained = np.array([share for share, _ in alike])
    # decided by words alone, before the model is asked; a form that all items have makes none of them near
    usual = np.median(contained[~present]) if not present.all() else 0.0
    there = present | (contained >= max(options.near, _UNUSUAL * usual))
    if controls is not None:
        others = tokenize_samples(tokenizer, controls, block_size=block_size, rejected=rejected)
        against = given_controls(session, documents, others, options.present)
    elif (kind := choose_kind(there, options)) == "made":
        against = make_controls(session, documents, there, options, block_size)
    else:
        against = no_controls(kind)
    everything = [*items, *against.samples]
    overlaps = [*found, *find_overlaps(session.index, [sample.parts for sample in against.samples])]
    ranked += best_chunks(
        session.index, [np.concatenate(sample.parts) for sample in against.samples], max(options.top, _POOL)
    )
    offsets = np.asarray(session.index.array("corpus/chunk_offsets"))
    candidates = [
        _candidates(overlap, like, offsets, options.top, sum(map(len, sample.parts)))
        for sample, overlap, like in zip(everything, overlaps, ranked, strict=True)
    ]
    if shared is None:
        arriving = measure_effects(session, everything, candidates, lambda_ratio=options.lambda_ratio)
    else:
        place, sharing = shared
        arriving = share_effects(place, everything, candidates, sharing, lambda_ratio=options.lambda_ratio)
    effects = []
    with progress("influence", len(everything), unit="texts") as bar:
        for effect in arriving:
            effects.append(effect)
            bar.advance()
    before = None if against.kind == "made" else losses_before(session, everything)
    p, each, compared, count = _rank(session, effects, against, there, before)
    q = grouped_q_values(p, there)
    return [
        Finding(
            document=item.document,
            verdict=verdict_of(bool(present[row]), bool(there[row]), float(q[row]) < options.level),
            p=float(p[row]),
            q=float(q[row]),
            lexical=_lexical(
                session,
                item,
                overlaps[row],
                (bool(present[row]), bool(there[row])),
                alike[row],
                ranked[row],
            ),
            effect=_effect(
                session,
                effects[row],
                len(candidates[row].chunks),
                (float(compared[row]), None if before is None else float(before[row])),
                each[row],
            ),
            controls={"kind": against.kind, "count": int(count[row])},
        )
        for row, item in enumerate(items)
    ]


def _rank(
    session: Session,
    effects: Sequence[Effect],
    against: Controls,
    present: np.ndarray,
    before: np.ndarray | None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """p (N,), that of each side (N, 2), the loss an item's is compared with (N,), number of controls (N,).

    `effects` are those of the items, then of the controls, and so are the losses `before` the fine-tuning: an
    easy item lost little then as well, so that what the fine-tuning took off says more than what is left.
    """
    n = len(present)
    losses = np.array([effect.loss for effect in effects])
    if against.kind == "made":
        knowledge, compared = steepness(session, losses, against, n)
    else:
        knowledge = -losses if before is None else log_losses(before) - log_losses(losses)
        compared = np.full(n, (losses[:n][~present] if against.kind == "absent" else losses[n:]).mean())
    statistics = np.stack([knowledge, [effect.copied_share for effect in effects]], axis=1)
    zero_is_nothing = (False, True)
    if against.kind != "absent":
        p, each = joint_p_values(statistics[:n], statistics[n:], zero_is_nothing=zero_is_nothing)
        return p, each, compared, np.full(n, len(against.samples))
    p, each = joint_p_values(statistics, statistics[~present], zero_is_nothing=zero_is_nothing)
    p[~present], each[~present] = leave_one_out_p_values(
        statistics[~present], zero_is_nothing=zero_is_nothing
    )
    return p, each, compared, (~present).sum() - ~present


def verdict_of(present: bool, there: bool, effect: bool) -> str:
    """The two kinds of evidence in words; `there` is also what is present in other words.

    What is merely like a document, and had no effect, is nothing to report.
    """
    if effect:
        return LEAKED if there else EFFECT
    return PRESENT if present else NOTHING


def _check(session: Session, documents: Sequence[Document]) -> None:
    refuse_classifier(session.index, "an audit compares texts")
    if not documents:
        raise UsageError("the benchmark is empty", fix='one object a line: {"id", "prompt", "response"}')


def _candidates(overlap: Overlap, ranked: Ranked, offsets: np.ndarray, top: int, length: int) -> Candidates:
    """The best chunks by BM25, those nearly as good, and the one of the longest shared run.

    `length` is the item's, in tokens.
    """
    scores = ranked.scores
    kept = max(top, int((scores >= _NEAR * scores[0]).sum())) if len(scores) else 0
    chunks, likeness = ranked.chunks[:kept], ranked.likeness[:kept]
    if overlap.token >= 0 and (longest := _chunk_of(overlap.token, offsets)) not in chunks:
        chunks = np.append(chunks, longest)
        likeness = np.append(likeness, overlap.longest / length)
    return Candidates(chunks, likeness)


def _chunk_of(token: int, offsets: np.ndarray) -> int:
    return int(np.searchsorted(offsets, token, side="right")) - 1


def _lexical(
    session: Session,
    item: Sample,
    overlap: Overlap,
    found_there: tuple[bool, bool],
    alike: tuple[float, int],
    ranked: Ranked,
) -> LexicalEvidence:
    """`found_there`: present; present or in other words. `alike`: as `most_contained` has it."""
    from stride_cli.recovery.passages import best_passage

    index, decode = session.index, session.model.tokenizer.decode
    found: LexicalEvidence = {
        "present": found_there[0],
        "near": found_there[1] and not found_there[0],
        "contained": alike[0],
        "contained_document": "",
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
        found["document"], found["chunk"], found["passage"] = index.document_id(document), chunk, passage
    if alike[1] >= 0:
        document = int(index.chunk_documents(np.array([alike[1]]))[0])
        found["contained_document"] = index.document_id(document)
    if len(ranked.chunks):
        chunk = int(ranked.chunks[0])
        document = int(index.chunk_documents(ranked.chunks[:1])[0])
        text = str(decode(index.chunk_tokens(chunk), skip_special_tokens=True))
        found["bm25_document"], found["bm25_chunk"] = index.document_id(document), chunk
        found["bm25_score"] = float(ranked.scores[0])
        found["bm25_passage"] = best_passage(text, item.document.plain_text, {})
    return found


def _effect(
    session: Session, effect: Effect, n_candidates: int, others: tuple[float, float | None], each: np.ndarray
) -> EffectRecord:
    """`others` are the losses of the controls, and of the model before its fine-tuning."""
    control_loss, base_loss = others
    strongest = ""
    if effect.strongest_chunk >= 0:
        document = int(session.index.chunk_documents(np.array([effect.strongest_chunk]))[0])
        strongest = session.index.document_id(document)
    return {
        "p_loss": float(each[0]),
        "p_influence": float(each[1]),
        "loss": effect.loss,
        "base_loss": base_loss,
        "control_loss": control_loss,
        "loss_gap": control_loss - effect.loss,
        "candidates": n_candidates,
        "candidate_influence": effect.candidate_influence,
        "candidate_share": effect.candidate_share,
        "copied_share": effect.copied_share,
        "strongest_document": strongest,
        "strongest_chunk": effect.strongest_chunk if effect.strongest_chunk >= 0 else None,
        "strongest_influence": effect.strongest_influence,
        "strongest_share": effect.strongest_share,
        "strongest_is_candidate": effect.strongest_is_candidate,
    }
