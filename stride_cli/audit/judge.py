"""Judge whether benchmark items were leaked: two kinds of evidence, one verdict."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from stride_cli.audit.bm25 import Ranked, best_chunks
from stride_cli.audit.calibration import grouped_q_values, joint_p_values, leave_one_out_p_values
from stride_cli.audit.controls import (
    Controls,
    choose_kind,
    given_controls,
    log_losses,
    make_controls,
    steepness,
)
from stride_cli.audit.effect import Candidates, Effect, Shared, losses_before, measure_effects
from stride_cli.audit.ngrams import Overlap, find_overlaps, most_contained
from stride_cli.audit.options import AuditOptions
from stride_cli.audit.samples import Rejected, Sample, read_documents_of, tokenize_samples
from stride_cli.data.queries import form_of
from stride_cli.errors import UsageError
from stride_cli.models.kinds import refuse_classifier
from stride_cli.output import progress

if TYPE_CHECKING:
    from index_format.reader import Index
    from stride_cli.attribution.session import Session
    from stride_cli.corpus.documents import Document
    from stride_cli.corpus.readers import ReadOptions
    from stride_cli.schema.audit_records import AuditRecord, ControlsRecord, EffectRecord, LexicalEvidence

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
    """Evidence on one item; `stride schema stride.audit/1` documents its record."""

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
    """Audit a file of items, perhaps against one of controls; both are read before the model is loaded.

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

    An item is there where it is present word for word (most of its n-grams), or near: one chunk holds many of
    its 3-grams, as a paraphrase does. Its effect on the model has two sides, each ranked among controls, and
    both have to be unusual (`calibration.joint_p_values`):

    - the loss; of a fine-tuned model whose base is at hand, how much of its loss went; against made controls,
      what a further step away costs (`audit.controls`);
    - the share of all influence that comes from the chunks most like the item, each counted by its likeness:
      a control has chunks like it as well, such as many copies of the one leaked item that it resembles.
      Influence that is exactly zero is never evidence.

    The rate of false discoveries is held among the items that are there, and among those that are not, each
    by itself.

    Parameters
    ----------
    session : Session
    documents : the benchmark's items, as from `samples.read_documents_of`
    controls : items that cannot be in the corpus; None: as the options say
    options : AuditOptions
    rejected : see `audit_files`; without it a QueryError is raised
    shared : as of `measure_effects`

    Returns
    -------
    list of Finding, in the order of the items

    Raises
    ------
    UsageError      an empty benchmark, a control that is in the corpus or in the benchmark (names it), no
                    item that is absent where those are to be controls, a classifier's index
    QueryError      an item without a scored token
    """
    # 1. the items as tokens
    _check(session, documents)
    index, tokenizer = session.index, session.model.tokenizer
    block_size = int(index.attributes["block_size"])
    tokenized = partial(tokenize_samples, tokenizer, block_size=block_size, form=form_of(session.workspace))
    items = tokenized(documents, rejected=rejected)
    documents = [item.document for item in items]
    _check(session, documents)

    # 2. what the corpus holds of them, decided by words alone, before the model is asked
    words = _compared(index, items, options)
    alike = [
        most_contained(index, item.parts, each.ranked.chunks[: options.top])
        for item, each in zip(items, words, strict=True)
    ]
    present = np.array([each.overlap.share >= options.present for each in words])
    contained = np.array([share for share, _ in alike])
    # a form that all items have makes none of them near
    usual = np.median(contained[~present]) if not present.all() else 0.0
    there = present | (contained >= max(options.near, _UNUSUAL * usual))

    # 3. controls
    if controls is not None:
        others = tokenized(controls, rejected=rejected)
        against = given_controls(session, documents, others, options.present)
    elif (kind := choose_kind(there, options)) == "made":
        against = make_controls(session, documents, there, options, tokenized)
    else:
        against = Controls(kind)

    # 4. loss and influences of items and controls
    everything = [*items, *against.samples]
    offsets = np.asarray(index.array("corpus/chunk_offsets"))
    compared = [*words, *_compared(index, against.samples, options)]
    candidates = [
        each.candidates(offsets, options.top, sum(map(len, sample.parts)))
        for each, sample in zip(compared, everything, strict=True)
    ]
    effects = []
    measured = measure_effects(
        session, everything, candidates, lambda_ratio=options.lambda_ratio, shared=shared
    )
    with progress("influence", len(everything), unit="texts") as bar:
        for effect in measured:
            effects.append(effect)
            bar.advance()
    before = None if against.kind == "made" else losses_before(session, everything)

    # 5. how unusual the items are, and what that comes to
    p, each_p, control_losses, count = _rank(session, effects, against, there, before)
    q = grouped_q_values(p, there)
    found = []
    for row, item in enumerate(items):
        lexical = _lexical(session, item, words[row], alike[row], offsets)
        lexical["present"], lexical["near"] = bool(present[row]), bool(there[row] and not present[row])
        losses = float(control_losses[row]), None if before is None else float(before[row])
        verdict = verdict_of(bool(present[row]), bool(there[row]), float(q[row]) < options.level)
        found.append(
            Finding(
                document=item.document,
                verdict=verdict,
                p=float(p[row]),
                q=float(q[row]),
                lexical=lexical,
                effect=_effect(index, effects[row], len(candidates[row].chunks), losses, each_p[row]),
                controls={"kind": against.kind, "count": int(count[row])},
            )
        )
    return found


def _rank(
    session: Session,
    effects: Sequence[Effect],
    against: Controls,
    present: np.ndarray,
    before: np.ndarray | None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Rank items among controls.

    `effects` are those of the items, then of the controls, and so are the losses `before` the fine-tuning: an
    easy item lost little then as well, so that what the fine-tuning took off says more than what is left.

    Returns
    -------
    p (N,), that of each side (N, 2), loss of the controls of each item (N,), number of its controls (N,)
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
    """Put the two kinds of evidence in words; `there` is also what is present in other words.

    What is merely like a document, and had no effect, is nothing to report.
    """
    if effect:
        return LEAKED if there else EFFECT
    return PRESENT if present else NOTHING


def _check(session: Session, documents: Sequence[Document]) -> None:
    refuse_classifier(session.index, "an audit compares texts")
    if not documents:
        raise UsageError("the benchmark is empty", fix='one object a line: {"id", "prompt", "response"}')


@dataclass(frozen=True)
class _Words:
    """Evidence of the corpus for one text: shared n-grams, and the chunks most like it by BM25."""

    overlap: Overlap
    ranked: Ranked

    def candidates(self, offsets: np.ndarray, top: int, length: int) -> Candidates:
        """Choose the best chunks by BM25, those nearly as good, and the one of the longest shared run.

        `length` is the text's, in tokens.
        """
        scores = self.ranked.scores
        kept = max(top, int((scores >= _NEAR * scores[0]).sum())) if len(scores) else 0
        chunks, likeness = self.ranked.chunks[:kept], self.ranked.likeness[:kept]
        if self.overlap.token >= 0 and (longest := _chunk_of(self.overlap.token, offsets)) not in chunks:
            chunks = np.append(chunks, longest)
            likeness = np.append(likeness, self.overlap.longest / length)
        return Candidates(chunks, likeness)


def _compared(index: Index, samples: Sequence[Sample], options: AuditOptions) -> list[_Words]:
    """Compare texts with the corpus."""
    parts = [sample.parts for sample in samples]
    ranked = best_chunks(index, [np.concatenate(each) for each in parts], max(options.top, _POOL))
    return [_Words(*each) for each in zip(find_overlaps(index, parts), ranked, strict=True)]


def _chunk_of(token: int, offsets: np.ndarray) -> int:
    return int(np.searchsorted(offsets, token, side="right")) - 1


def _document_of(index: Index, chunk: int) -> str:
    """Find the id of a chunk's document; "" for chunk -1."""
    return index.document_id(int(index.chunk_documents(np.array([chunk]))[0])) if chunk >= 0 else ""


def _lexical(
    session: Session, item: Sample, words: _Words, contained: tuple[float, int], offsets: np.ndarray
) -> LexicalEvidence:
    """`contained` is as `most_contained` has it."""
    from stride_cli.attribution.passages import best_passage

    index, decode = session.index, session.model.tokenizer.decode
    overlap, ranked = words.overlap, words.ranked
    chunk = passage = best = None
    if overlap.token >= 0:  # the run, with some tokens of its document on each side
        chunk = _chunk_of(overlap.token, offsets)
        held = index.document_chunks(int(index.chunk_documents(np.array([chunk]))[0]))
        low = max(int(offsets[held.start]), overlap.token - _AROUND)
        stop = overlap.token + min(overlap.longest, _LONGEST_PASSAGE) + _AROUND
        tokens = np.asarray(index.array("corpus/tokens")[low : min(int(offsets[held.stop]), stop)])
        passage = str(decode(tokens, skip_special_tokens=True)).strip()
    if len(ranked.chunks):
        best = int(ranked.chunks[0])
        text = str(decode(index.chunk_tokens(best), skip_special_tokens=True))
    return {
        "present": False,
        "near": False,
        "contained": contained[0],
        "contained_document": _document_of(index, contained[1]),
        "ngram": overlap.ngram,
        "ngram_share": overlap.share,
        "longest_run": overlap.longest,
        "document": "" if chunk is None else _document_of(index, chunk),
        "chunk": chunk,
        "passage": passage or "",
        "bm25_document": "" if best is None else _document_of(index, best),
        "bm25_chunk": best,
        "bm25_score": 0.0 if best is None else float(ranked.scores[0]),
        "bm25_passage": "" if best is None else best_passage(text, item.document.plain_text, {}),
    }


def _effect(
    index: Index, effect: Effect, n_candidates: int, others: tuple[float, float | None], each: np.ndarray
) -> EffectRecord:
    """`others` are the losses of the controls, and of the model before its fine-tuning."""
    control_loss, base_loss = others
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
        "strongest_document": _document_of(index, effect.strongest_chunk),
        "strongest_chunk": effect.strongest_chunk if effect.strongest_chunk >= 0 else None,
        "strongest_influence": effect.strongest_influence,
        "strongest_share": effect.strongest_share,
        "strongest_is_candidate": effect.strongest_is_candidate,
    }
