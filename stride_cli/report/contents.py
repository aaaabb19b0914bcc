"""Gather what a report shows of one answer: from a live answer, or from the record of a saved one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from stride_cli.attribution.passages import WORD, carried_parts, template_opening, words
from stride_cli.schema.answer_records import DECIDED

if TYPE_CHECKING:
    from stride_cli.attribution.answer import Answer
    from stride_cli.attribution.session import Session


@dataclass(frozen=True)
class ShownHit:
    """One document in a report.

    Attributes
    ----------
    record : dict          the hit's part of the answer's record
    text : str             of its chunk; of a saved answer, its passage only
    span : (int, int)      characters of `text` that carry the influence; (0, 0) where none do
    held : float or None   part of the chunk's influence of this sign that they hold; None: not measured, the
                           span is the sentence most like the query
    whole : bool           `text` is the whole chunk
    picture : str          of a classifier: its input, a ``data:`` address; else empty
    """

    record: Mapping[str, Any]
    text: str
    span: tuple[int, int]
    held: float | None = None
    whole: bool = True
    picture: str = ""


@dataclass(frozen=True)
class ShownAnswer:
    """One query in a report.

    Attributes
    ----------
    record : dict              the ``stride.answer/1`` record
    pieces : tuple             the response as (text, decided) pairs, a word each; decided is None where the
                               scored tokens are not known
    supporters, opposers : tuple of ShownHit
    responses : two (K,) float64, or None      of the subsets, and what the recovery explains of them; only
                               their proportions mean something
    picture : str              of a classifier: the query's input, a ``data:`` address; else empty
    """

    record: Mapping[str, Any]
    pieces: tuple[tuple[str, bool | None], ...]
    supporters: tuple[ShownHit, ...]
    opposers: tuple[ShownHit, ...]
    responses: tuple[np.ndarray, np.ndarray] | None = None
    picture: str = ""


def from_record(record: Mapping[str, Any]) -> ShownAnswer:
    """Show of a saved answer everything but whole chunks and responses."""

    def shown(hit: Mapping[str, Any]) -> ShownHit:
        stop = 0 if "label" in hit else len(hit["passage"])  # a classifier's row has only its label
        return ShownHit(hit, hit["passage"], (0, stop), whole=False)

    supporters, opposers = (tuple(map(shown, record[side])) for side in ("hits", "opposers"))
    return ShownAnswer(record, ((record["response"], None),), supporters, opposers)


def from_answer(session: Session, answer: Answer, *, name: str | None = None) -> ShownAnswer:
    """Show everything of an answer; reads the chunks again for the parts that carry influence.

    Parameters
    ----------
    session : Session      that gave the answer
    name : str, optional   the query's id
    """
    record = replace(answer, id=name).to_record()
    shown = from_record(record)
    if session.model.table is not None:
        picture, *pictures = _pictures(session, answer)
        both = zip((*shown.supporters, *shown.opposers), pictures, strict=True)
        hits = [replace(hit, picture=own) for hit, own in both]
        shown = replace(shown, picture=picture)
    else:
        hits = _read_chunks(session, answer, [*record["hits"], *record["opposers"]])
        shown = replace(shown, pieces=tuple((text, weight >= DECIDED) for text, weight in answer.pieces))
    count = len(answer.supporters)
    return replace(
        shown,
        supporters=tuple(hits[:count]),
        opposers=tuple(hits[count:]),
        responses=(answer.measured, answer.measured - answer.solution.residual),
    )


def matching_spans(text: str, query: str) -> list[tuple[int, int]]:
    """Find words of the query, longer than three letters, in ``text``: (start, stop) characters."""
    wanted = {word for word in words(query) if len(word) > 3 or word.isdigit()}
    return [match.span() for match in WORD.finditer(text) if match.group().lower() in wanted]


def _pictures(session: Session, answer: Answer) -> list[str]:
    """Draw the inputs of a classifier's query and of its hits, in this order."""
    from stride_cli.report.thumbnails import thumbnail, value_range

    model: Any = session.model
    hits = (*answer.supporters, *answer.opposers)
    inputs = model.table.take(np.array([int(answer.query.ids[0]), *(hit.chunk for hit in hits)]))
    low, high = value_range(inputs)
    return [thumbnail(values, low, high) for values in inputs]


def _read_chunks(session: Session, answer: Answer, records: Sequence[Mapping[str, Any]]) -> list[ShownHit]:
    """Show every hit with the text of its chunk and the part of it that carries the influence."""
    chunks = {record["chunk"]: record["sign"] == "supports" for record in records}
    parts = carried_parts(session.steered[0], session.workspace, answer.query, answer.responses, chunks)
    opening, shown = template_opening(session.model.tokenizer, answer.query.form), []
    for record in records:
        part = parts[record["chunk"]]
        text = part.text.removeprefix(opening)
        span = tuple(max(0, place - len(part.text) + len(text)) for place in part.span)
        if part.held is None:
            passage = record["passage"].strip("…")
            at = text.find(passage)
            span = (at, at + len(passage)) if at >= 0 else (0, 0)
        shown.append(ShownHit(record, text, (span[0], span[-1]), part.held))
    return shown
