"""What a report shows of one answer, as data: from a live answer, or from the record of a saved one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from stride_cli.attribution.carriers import carried_by, direction_of, token_influence, token_spans
from stride_cli.report.explanation import caveats, explain, flags

if TYPE_CHECKING:
    from stride_cli.attribution.answer import Answer
    from stride_cli.attribution.session import Session
    from stride_cli.recovery.ranking import Hit

_CURVE_POINTS = 33
_TOGETHER = 8  # chunks read at once for the part that carries their influence


@dataclass(frozen=True)
class ShownHit:
    """One document in a report.

    Attributes
    ----------
    document, sign, rank, influence, share : as in the record of a hit
    flags : tuple of str       what is special about it, in words
    text : str                 of its chunk; of a saved answer, its passage only
    span : (int, int)          characters of `text` that carry the influence; (0, 0) where none do
    held : float or None       part of the chunk's influence of this sign that they hold; None: not measured,
                               the span is the sentence most like the query
    whole : bool               `text` is the whole chunk
    chunk : int
    picture : str              of a classifier: its input, a ``data:`` address; else empty
    above_line : as in the record of a hit
    """

    document: str
    sign: str
    rank: float
    influence: float | None
    share: float | None
    flags: tuple[str, ...]
    text: str
    span: tuple[int, int]
    held: float | None
    whole: bool
    chunk: int
    picture: str = ""
    above_line: bool | None = None


@dataclass(frozen=True)
class Responses:
    """What the K subsets answered against what the recovery explains of it, both (K,) float64 in the unit of
    measurements, of which only proportions mean something."""

    measured: np.ndarray
    recovered: np.ndarray


@dataclass(frozen=True)
class Concentration:
    """Part of the total absolute influence that the strongest chunks hold.

    Attributes
    ----------
    counts : (P,) int64       so many chunks …
    held : (P,) float64       … hold this part
    n_chunks : int            of all chunks, those without influence included
    """

    counts: np.ndarray
    held: np.ndarray
    n_chunks: int


@dataclass(frozen=True)
class ShownAnswer:
    """One query in a report.

    Attributes
    ----------
    record : dict              the ``stride.answer/1`` record
    pieces : tuple             the response as (text, scored) pairs, a token each; scored is None where the
                               scored tokens are not known
    supporters, opposers : tuple of ShownHit
    explanation : str          two sentences
    caveats : tuple of str
    responses : Responses or None
    concentration : Concentration or None
    picture : str              of a classifier: the query's input, a ``data:`` address; else empty
    """

    record: Mapping[str, Any]
    pieces: tuple[tuple[str, bool | None], ...]
    supporters: tuple[ShownHit, ...]
    opposers: tuple[ShownHit, ...]
    explanation: str
    caveats: tuple[str, ...]
    responses: Responses | None = None
    concentration: Concentration | None = None
    picture: str = ""


def from_record(record: Mapping[str, Any]) -> ShownAnswer:
    """What can be shown of a saved answer: everything but whole chunks, responses and concentration."""

    def shown(hit: Mapping[str, Any]) -> ShownHit:
        passage = hit["passage"]
        stop = 0 if "label" in hit else len(passage)  # a classifier's row has no passage, only its label
        return _shown_hit(hit, text=passage, span=(0, stop), held=None, whole=False)

    return ShownAnswer(
        record=record,
        pieces=((record["response"], None),),
        supporters=tuple(shown(hit) for hit in record["hits"]),
        opposers=tuple(shown(hit) for hit in record["opposers"]),
        explanation=explain(record),
        caveats=tuple(caveats(record)),
    )


def from_answer(session: Session, answer: Answer, *, name: str | None = None) -> ShownAnswer:
    """Everything a report shows of an answer; reads the chunks again for the parts that carry influence.

    Parameters
    ----------
    session : Session      that gave the answer
    name : str, optional   the query's id
    """
    record = answer.to_record()
    if name is not None:
        record = {"id": name, **record}
    if session.model.table is not None:
        shown = from_record(record)
        pictures = _pictures(session, answer)
        hits = tuple(
            replace(hit, picture=picture)
            for hit, picture in zip((*shown.supporters, *shown.opposers), pictures[1:], strict=True)
        )
        supporters, opposers = hits[: len(shown.supporters)], hits[len(shown.supporters) :]
        pieces, picture = shown.pieces, pictures[0]
    else:
        hits = _read_chunks(session, answer)
        supporters, opposers = hits[: len(answer.supporters)], hits[len(answer.supporters) :]
        pieces, picture = scored_pieces(session.model.tokenizer, answer), ""
    solution = answer.solution
    return ShownAnswer(
        record=record,
        pieces=pieces,
        supporters=supporters,
        opposers=opposers,
        explanation=explain(record),
        caveats=tuple(caveats(record)),
        responses=Responses(answer.measured, answer.measured - solution.residual),
        concentration=concentration(answer.influences.values, solution.n_chunks),
        picture=picture,
    )


def concentration(values: np.ndarray, n_chunks: int) -> Concentration | None:
    """The concentration curve of the weights that are not zero, (nnz,) float64; None where there are none."""
    if len(values) == 0:
        return None
    held = np.cumsum(-np.sort(-np.abs(values)))
    counts = np.unique(np.round(np.geomspace(1, len(values), _CURVE_POINTS)).astype(np.int64))
    return Concentration(counts, held[counts - 1] / held[-1], n_chunks)


def scored_pieces(tokenizer: Any, answer: Answer) -> tuple[tuple[str, bool | None], ...]:
    """The response token by token, and which tokens are scored."""
    query = answer.query
    text, spans = token_spans(tokenizer, query.ids)
    begin = text.rfind(query.response)
    if begin < 0 or not query.response:
        return ((query.response, None),)  # the tokenizer does not give the response back as it was written
    stop = begin + len(query.response)
    pieces: list[tuple[str, bool | None]] = []
    for (start, end), weight in zip(spans, query.weights, strict=True):
        piece = text[max(start, begin) : min(end, stop)] if end > begin and start < stop else ""
        if piece:
            pieces.append((piece, bool(weight)))
    return tuple(pieces)


def _pictures(session: Session, answer: Answer) -> list[str]:
    """The inputs of a classifier's query and of its hits, in this order."""
    from stride_cli.report.thumbnails import thumbnail, value_range

    model: Any = session.model
    hits = (*answer.supporters, *answer.opposers)
    inputs = model.table.take(np.array([int(answer.query.ids[0]), *(hit.chunk for hit in hits)]))
    low, high = value_range(inputs)
    return [thumbnail(values, low, high) for values in inputs]


def _read_chunks(session: Session, answer: Answer) -> tuple[ShownHit, ...]:
    """Every hit with the text of its chunk and the part of it that carries the influence."""
    from stride_cli.data.batches import ChunkReader

    reader, hits = ChunkReader(session.index), [*answer.supporters, *answer.opposers]
    records = [*answer.to_record()["hits"], *answer.to_record()["opposers"]]
    own = answer.responses[: session.operators.n_subsets]  # of several models the index's own
    direction, shown = direction_of(session.steered[0], answer.query, own), []
    for start in range(0, len(hits), _TOGETHER):
        group = hits[start : start + _TOGETHER]
        batch = reader.batch(np.array([hit.chunk for hit in group]))
        found = token_influence(session.steered[0], direction, batch)
        for hit, record, values in zip(group, records[start:], found, strict=False):
            shown.append(_carried(session, answer, hit, record, values))
    return tuple(shown)


def _carried(
    session: Session, answer: Answer, hit: Hit, record: Mapping[str, Any], values: np.ndarray
) -> ShownHit:
    tokens = session.index.chunk_tokens(hit.chunk)
    found = carried_by(session.model.tokenizer, tokens, values, supports=hit.sign == "supports")
    if found.held is not None:
        return _shown_hit(record, text=found.text, span=found.span, held=found.held, whole=True)
    text = found.text
    passage = answer.passages.get(hit.chunk, "").strip("…")
    at = text.find(passage)
    span = (at, at + len(passage)) if at >= 0 else (0, 0)
    return _shown_hit(record, text=text, span=span, held=None, whole=True)


def _shown_hit(
    record: Mapping[str, Any], *, text: str, span: tuple[int, int], held: float | None, whole: bool
) -> ShownHit:
    return ShownHit(
        document=record["document"],
        sign=record["sign"],
        rank=record["rank"],
        influence=record["influence"],
        share=record["share"],
        flags=tuple(flags(record)),
        text=text,
        span=span,
        held=held,
        whole=whole,
        chunk=record["chunk"],
        above_line=record.get("above_line"),
    )


def prominence(answers: Sequence[ShownAnswer]) -> list[ShownHit | None]:
    """The strongest hit of every answer, of either sign; None where no document has any weight."""
    found: list[ShownHit | None] = []
    for answer in answers:
        weighted = [hit for hit in (*answer.supporters, *answer.opposers) if hit.share]
        found.append(max(weighted, key=lambda hit: hit.share or 0.0, default=None))
    return found
