"""Judge whether benchmark items were leaked: what the corpus holds, what the model shows, one verdict."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from stride_cli.audit.calibration import benjamini_hochberg, fewest_together
from stride_cli.audit.controls import FEWEST, Held, check_controls, choose_kind
from stride_cli.audit.effect import Effect, Shared, measure_effects
from stride_cli.audit.options import AuditOptions
from stride_cli.audit.presence import ITEM, REWORDED, Copy, differences, document_text, find_copies
from stride_cli.audit.ranking import Test, among_controls, among_versions
from stride_cli.audit.samples import (
    Rejected,
    Sample,
    copy_sample,
    parts_of,
    read_documents_of,
    tokenize_samples,
)
from stride_cli.corpus.forms import Form
from stride_cli.data.queries import form_of
from stride_cli.errors import UsageError
from stride_cli.models.kinds import refuse_classifier
from stride_cli.output import progress

if TYPE_CHECKING:
    from index_format.reader import Index
    from stride_cli.attribution.session import Session
    from stride_cli.corpus.documents import Document
    from stride_cli.corpus.readers import ReadOptions
    from stride_cli.data.workspace import Workspace
    from stride_cli.schema.audit_records import AuditRecord, ControlsRecord, EffectRecord, PresenceRecord

LEAKED, PRESENT, NOTHING, UNDECIDED = "leaked and learnt", "present, no effect", "no evidence", "undecided"
VERDICTS = (LEAKED, PRESENT, UNDECIDED, NOTHING)
_POWER = 0.5  # below, an effect that is not found is no evidence that there is none
_ALIKE = 300  # controls that are put as copies are, at most: each kind takes as many again
_WIDE, _PASSAGE = 60, 700  # characters around a copy that are shown, and of a copy


@dataclass(frozen=True)
class Finding:
    """Evidence on one item; `stride schema stride.audit/2` documents its record."""

    document: Document
    verdict: str
    reason: str
    p: float | None
    q: float | None
    presence: PresenceRecord
    effect: EffectRecord
    controls: ControlsRecord

    def to_record(self) -> AuditRecord:
        item: Any = {"schema": "stride.audit/2", "item": self.document.id, "line": self.document.line}
        found: AuditRecord = item | {name: getattr(self, name) for name in list(vars(self))[1:]}
        return found


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

    CorpusError where a file cannot be read, or has an item without a prompt or text.
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
    """Judge every item of a benchmark: one finding each, in order.

    1. *Presence* (`presence`), by words alone: the document that holds the item, a part of it, or the same in
       other words.
    2. *Effect* (`ranking`), by the loss: of a copy as it stands in the corpus, how steep it is (`controls`);
       of an item in other words, its own loss. Of a fine-tuned model whose base is at hand, what fine-tuning
       took off. The rate of false discoveries is held among the items that are there.
    3. The influence of the documents that hold an item is told, and is no part of the test: an item that is
       in the corpus has such documents whether the model learnt it or not, and controls have none.

    Args:
        documents: the benchmark's items, as from `samples.read_documents_of`
        controls: items that cannot be in the corpus; None: as the options say
        rejected: Takes every item or control that cannot be used: its error, file, line and id. Default: the
            first one's error is raised, or it is as the options of reading say.
        shared: as of `measure_effects`

    Raises:
        UsageError: An empty benchmark, a control that is in the corpus or in the benchmark (names it), no
            item that is absent where those are to be controls, a classifier's index.
        QueryError: An item without a scored token.
    """
    # 1. the items as tokens, in the corpus's form
    _check(session, documents)
    index, tokenizer = session.index, session.model.tokenizer
    block_size = int(index.attributes["block_size"])
    form = _as_trained(session)
    tokenized = partial(tokenize_samples, tokenizer, block_size=block_size, form=form)
    items = tokenized(documents, rejected=rejected)
    documents = [item.document for item in items]
    _check(session, documents)
    others = [] if controls is None else tokenized(controls, rejected=rejected)

    # 2. what the corpus holds of them, decided by words alone, before the model is asked
    texts = [parts_of(each.document) for each in (*items, *others)]
    with progress("reading the corpus"):
        copies = find_copies(index, tokenizer, texts, options)
    copies, of_controls = copies[: len(items)], copies[len(items) :]
    check_controls(documents, [each.document for each in others], of_controls)
    found = np.array([copy.found for copy in copies])
    exact = (found != "") & (found != REWORDED)
    measured = [
        copy_sample(session.workspace, item.document, copy.document, copy.span) if there else item
        for item, copy, there in zip(items, copies, exact, strict=True)
    ]

    # 3. their losses among those of controls
    absent = np.array([not copy.found and not copy.common for copy in copies])
    kind = "file" if controls is not None else choose_kind(int(absent.sum()), options)
    if kind == "made":
        test = among_versions(session, measured, exact, absent, options)
    else:
        against = others if kind == "file" else [items[row] for row in np.flatnonzero(absent).tolist()]
        kinds, alike = controls_alike(
            session.workspace, tokenized, against, measured, copies, form.name != "text"
        )
        test = among_controls(session, kind, measured, kinds, alike, options)
    # items without a copy are tested against a file's controls: where those are controls, none can stand out
    tested = np.isfinite(test.p) & ((found != "") | (kind == "file"))
    groups = np.where(exact, 2, found == REWORDED)
    # copies are few, and leaks among them many: together with thousands of others they would pay for tests
    # that nobody wondered about (Efron 2008, "Simultaneous inference: when should … be combined?")
    q = np.ones(len(items))
    for group in np.unique(groups[tested]):
        rows = tested & (groups == group)
        q[rows] = benjamini_hochberg(test.p[rows])

    # 4. influences of what is there, and what it comes to
    there = [row for row, copy in enumerate(copies) if copy.found]
    chunks_of = index.document_chunks
    candidates = [np.array([c for d in copies[row].like for c in chunks_of(d)], np.int64) for row in there]
    effects: dict[int, Effect] = {}
    with progress("influence", len(there), unit="texts") as bar:
        asked, ratio = [measured[row] for row in there], options.lambda_ratio
        found_of = measure_effects(session, asked, candidates, lambda_ratio=ratio, shared=shared)
        for row, effect in zip(there, found_of, strict=True):
            effects[row] = effect
            bar.advance()
    findings = []
    for row, item in enumerate(items):
        count = int(test.count[row])
        together = fewest_together(int((groups[tested] == groups[row]).sum()), count, options.level)
        verdict, reason = _verdict(copies[row], test, row, float(q[row]), options.level)
        findings.append(
            Finding(
                document=item.document,
                verdict=verdict,
                reason=reason,
                p=float(test.p[row]) if tested[row] else None,
                q=float(q[row]) if tested[row] else None,
                presence=_presence(session, item, copies[row]),
                effect=_effect(index, effects.get(row), test, row),
                controls={
                    "kind": kind,
                    "like": str(test.kinds[row]),
                    "count": count,
                    "sources": test.sources,
                    "power": float(test.power[row]),
                    "together": together if tested[row] else None,
                },
            )
        )
    return findings


def controls_alike(
    workspace: Workspace,
    tokenized: Callable[..., list[Sample]],
    against: Sequence[Sample],
    items: Sequence[Sample],
    copies: Sequence[Copy],
    answers: bool,
) -> tuple[np.ndarray, dict[str, Sequence[Sample]]]:
    """Put controls as the corpus holds the copies: the kind of each item, "" for no copy; those of each kind.

    `answers`: these alone were trained on.
    """
    exact = [row for row, copy in enumerate(copies) if copy.found not in ("", REWORDED)]
    held = {row: Held.of(workspace, items[row], copies[row], answers) for row in exact}
    kinds, alike = np.array([ITEM * (row in held) for row in range(len(items))], object), {ITEM: against}
    for kind in {own.kind for own in held.values()} - {ITEM}:
        rows = [row for row, own in held.items() if own.kind == kind]
        split = float(np.median([held[row].split for row in rows]))
        put = (held[rows[0]].put(each.document, split) for each in against[:_ALIKE])
        made = tokenized(list(filter(None, put)), rejected=lambda *bad: None)
        if len(made) >= FEWEST:
            alike[kind], kinds[rows] = made, kind
    return kinds, alike


def _verdict(copy: Copy, test: Test, row: int, q: float, level: float) -> tuple[str, str]:
    """Choose one of the four verdicts, and say why where nothing was decided."""
    p = float(test.p[row])
    if copy.common:
        return UNDECIDED, "so short, and in so many documents, that finding it tells nothing"
    if not copy.found:
        if test.kind == "file" and test.sources >= FEWEST and q < level:
            return UNDECIDED, "no copy was found, and the model treats it unlike the controls"
        return NOTHING, ""
    if test.kind == "made" and copy.found == REWORDED:
        return UNDECIDED, "in other words: versions of items are no controls for that"
    if test.sources < FEWEST:
        return UNDECIDED, f"controls come from {test.sources} texts, and it takes {FEWEST}"
    if np.isnan(p):
        return UNDECIDED, "nothing in it can be changed to compare it with"
    if q < level:
        return LEAKED, ""
    if p <= level:
        return UNDECIDED, "unusual by itself, not among so many items: more controls would tell"
    if test.power[row] < _POWER:
        share = f"{test.power[row]:.0%}"
        return UNDECIDED, f"with these controls {share} of items whose loss was halved are found"
    if test.kind == "made":
        return UNDECIDED, "versions of items as controls show what was learnt by heart alone"
    return PRESENT, ""


def _check(session: Session, documents: Sequence[Document]) -> None:
    refuse_classifier(session.index, "an audit compares texts")
    if not documents:
        raise UsageError("the benchmark is empty", fix='one object a line: {"id", "prompt", "response"}')


def _as_trained(session: Session) -> Form:
    """Return the form in which training saw the corpus: texts, and pairs joined as such, are scored whole."""
    form, attributes = form_of(session.workspace), session.index.attributes
    counts, recorded = attributes.get("counts") or {}, Form.recorded(attributes)
    texts = 2 * counts.get("conversations", 0) <= counts.get("documents", 1)
    whole = texts or (recorded is not None and recorded.name == "text")
    return replace(form, name="text") if whole else form


def _presence(session: Session, item: Sample, copy: Copy) -> PresenceRecord:
    passage, document, told = "", "", list[tuple[str, str]]()
    if copy.document >= 0:
        text, _ = document_text(session.index, session.model.tokenizer, copy.document)
        begin, end = copy.span
        document, passage = session.index.document_id(copy.document), text[begin:end]
        ours = parts_of(item.document)
        if copy.found:
            own = {"prompt": ours[:1], "response": ours[-1:]}.get(copy.found, ours)
            # how prompt and response are joined is the corpus's
            told = min((differences(between.join(own), passage) for between in (" ", "\n")), key=len)
        end = min(end, begin + _PASSAGE)
        passage = text[max(0, begin - _WIDE) : begin] + text[begin:end] + text[end : end + _WIDE]
    return {
        "found": copy.found,
        "share": copy.share,
        "loose_share": copy.loose,
        "numbers": copy.numbers,
        "longest_run": copy.longest,
        "document": document,
        "documents": len(copy.like),
        "passage": passage,
        "differences": [list(pair) for pair in told],
    }


def _effect(index: Index, effect: Effect | None, test: Test, row: int) -> EffectRecord:
    other, chunk = float(test.others[row]), -1 if effect is None else effect.strongest_chunk
    strongest = int(index.chunk_documents(np.array([chunk]))[0]) if chunk >= 0 else -1
    return {
        "loss": float(test.losses[row]),
        "base_loss": None if test.before is None else float(test.before[row]),
        "control_loss": other if np.isfinite(other) else None,
        "influence": None if effect is None else effect.candidate_influence,
        "influence_share": None if effect is None else effect.candidate_share,
        "strongest_document": index.document_id(strongest) if strongest >= 0 else "",
        "strongest_share": None if effect is None else effect.strongest_share,
    }
