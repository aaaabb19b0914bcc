"""From weights of chunks to ranked documents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from stride_cli.errors import UsageError
from stride_cli.schema.answer_records import PASSAGE
from stride_cli.schema.derivation import key

if TYPE_CHECKING:
    from stride_cli.recovery.lasso import Solution
    from stride_cli.recovery.screening import Design

_TIE = 1e-12  # influences closer than this, relatively, are one influence
_NOISE = 1e-12  # correlations below this share of ‖r‖ √d are rounding


@dataclass(frozen=True, kw_only=True)
class Hit:
    """One document that supports or opposes the prediction, its influence in the unit of y.

    `Answer.hits` have what its record says more: the document's name, and influences in the answer's unit.
    """

    rank: float = key("position, 1 = most influential; ties share their mid-rank")
    document: int  # numbered in the index
    name: str = key("the document's id", name="document", default="")
    title: str | None = key("the document's, where the corpus gives one", default=None, lacking=True)
    influence: float = key(
        "estimate: how far training on it moves the response's loss, in the answer's unit, summed over its "
        "chunks; > 0 supports (lowers it), < 0 opposes"
    )
    low: float | None = key("of nine in ten single retrainings, in nats", default=None, lacking=True)
    high: float | None = key("likewise, the upper end", default=None, lacking=True)
    share: float = key("|influence| / Σ|influence of every chunk|, 0 … 1")
    above_line: bool | None = key(
        "whether it is above the line of `judged`; null without one", default=None, optional=True
    )
    sign: str = key('"supports" or "opposes"')
    chunk: int = key("the document's most influential chunk, numbered in the index")
    passage: str = key(PASSAGE, default="")
    label: str | None = key("of a classifier: the training row's label", default=None, lacking=True)
    trained: bool | None = key(
        "false: the model was not trained on it, by its own record", default=None, lacking=True
    )
    seen: bool = key("whether the fit of the operators has seen that chunk", default=True)
    neighbours: int = key(
        "other chunks that share all but one of its subsets: not told apart from it, unless it was read",
        default=0,
    )
    backfilled: bool = key(
        "not in the sparse solution: ranked by correlation with what it leaves unexplained", default=False
    )
    read: bool | None = key(
        "that chunk's influence is from its own gradient; false: recovered from subsets; null: all are",
        default=False,
        optional=True,
    )


def told_apart(hits: Sequence[Hit], read: np.ndarray, *, estimated: bool = False) -> list[Hit]:
    """The hits, those whose chunk is among the chunks that were `read` (t,), ascending, marked as such; none
    has neighbours where others were `estimated` by more than the subsets."""
    known = set(read.tolist())
    return [
        replace(hit, read=hit.chunk in known, neighbours=0) if estimated or hit.chunk in known else hit
        for hit in hits
    ]


def rank_documents(
    solution: Solution, columns: Any, chunk_document: Any, *, top: int, bottom: int = 0, seen: Any = None
) -> tuple[list[Hit], list[Hit]]:
    """The documents that support a prediction most, and those that oppose it most.

    Parameters
    ----------
    solution : Solution
    columns : (n, d) uint16 or uint32, or shards; the design that `solution` was found for
    chunk_document : (n,) int64   document of each chunk, in one array or what gathers rows as one does
    top, bottom : int             how many supporters and opposers at most
    seen : (n,) of bool or uint8, optional   chunks that the operators were fitted on (None: all); chunks
        beyond its end were not

    Returns
    -------
    supporters, opposers : lists of Hit, strongest first
        A document whose influence is 0 is in neither. When fewer than `top` documents support, those without
        any weight follow, by the correlation of their best chunk with the residual as long as it is positive,
        marked `backfilled`. Opposers are never backfilled.

    Raises
    ------
    UsageError     `chunk_document` does not have n entries; top or bottom is negative
    """
    from stride_cli.recovery.screening import Design  # compiles; records are read without it

    if len(chunk_document) != solution.n_chunks:
        raise UsageError(f"chunk_document has {len(chunk_document)} entries for {solution.n_chunks} chunks")
    if top < 0 or bottom < 0:
        raise UsageError(f"top is {top} and bottom is {bottom}: neither can be negative")
    total, chunks, values = solution.total, solution.indices, solution.values
    documents, owner, influence = _documents(solution, chunk_document)

    def strongest(sign: int, count: int) -> list[Hit]:
        chosen = np.flatnonzero(sign * influence > _TIE * total)
        order = chosen[np.argsort(-sign * influence[chosen], kind="stable")]
        ranks = mid_ranks(influence[order])
        hits = []
        for rank, at in zip(ranks[:count], order[:count], strict=True):
            own = np.flatnonzero(owner == at)
            hits.append(
                Hit(
                    rank=float(rank),
                    document=int(documents[at]),
                    influence=float(influence[at]),
                    share=abs(float(influence[at])) / total if total else 0.0,
                    sign="supports" if sign > 0 else "opposes",
                    chunk=int(chunks[own[np.argmax(sign * values[own])]]),
                )
            )
        return hits

    design = Design(columns, len(solution.residual))
    supporters, opposers = strongest(+1, top), strongest(-1, bottom)
    if len(supporters) < top and solution.average >= 0.0:
        more = _backfill(solution, design, chunk_document, documents, len(supporters), top)
        supporters += [_with_average(hit, solution, chunk_document) for hit in more]
    hits = supporters + opposers
    if hits:
        shown = np.array([hit.chunk for hit in hits])
        counts = design.count_neighbours(shown)
        fitted = np.full(len(hits), seen is None)
        if seen is not None:
            there = shown < len(seen)
            fitted[there] = np.asarray(seen[shown[there]]) != 0
        hits = [
            replace(hit, neighbours=int(count), seen=bool(known))
            for hit, count, known in zip(hits, counts, fitted, strict=True)
        ]
    return hits[: len(supporters)], hits[len(supporters) :]


def _documents(solution: Solution, chunk_document: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Documents with a listed chunk (D,), ascending; the place there of each listed chunk's; the influence of
    all their chunks (D,)."""
    documents, owner = np.unique(np.asarray(chunk_document[solution.indices]), return_inverse=True)
    influence = np.bincount(owner, solution.values, minlength=len(documents))
    if solution.average and len(solution.indices) < solution.n_chunks:
        # their other chunks have the average's
        counts = np.bincount(np.asarray(chunk_document[:]), minlength=int(documents.max(initial=-1)) + 1)
        influence += solution.average * (counts[documents] - np.bincount(owner, minlength=len(documents)))
    return documents, owner, influence


def _with_average(hit: Hit, solution: Solution, chunk_document: Any) -> Hit:
    """Give a document without a listed chunk the average's influence for each of its chunks."""
    if not solution.average:
        return hit
    influence = solution.average * int((np.asarray(chunk_document[:]) == hit.document).sum())
    return replace(hit, influence=influence, share=abs(influence) / solution.total)


def document_influences(solution: Solution, chunk_document: Any) -> tuple[np.ndarray, np.ndarray, float]:
    """Documents with weight (D,), ascending; their summed influence (D,); what is below it is rounding."""
    documents, _, influence = _documents(solution, chunk_document)
    return documents, influence, _TIE * solution.total


def mid_ranks(values: np.ndarray) -> np.ndarray:
    """Ranks 1, 2, … of values that are already in order; equal ones share the mean of their ranks."""
    ranks = np.empty(len(values))
    start = 0
    for end in range(1, len(values) + 1):
        if end == len(values) or abs(values[end] - values[start]) > _TIE * abs(values[start]):
            ranks[start:end] = 0.5 * (start + 1 + end)
            start = end
    return ranks


def _backfill(
    solution: Solution, design: Design, chunk_document: Any, weighted: np.ndarray, ranked: int, top: int
) -> list[Hit]:
    """Documents without weight whose best chunk correlates with the residual, best first."""
    residual = solution.residual
    noise = _NOISE * float(np.sqrt(residual @ residual * design.degree))
    wanted = 16 * (top + len(weighted))
    sampled = design.sample_scores(residual, signed=True)
    while True:
        floor = max(noise, design.floor_for(sampled, wanted))
        found = design.scan(residual, floor, signed=True, capacity=wanted)
        complete = found.values >= found.complete
        order = np.flatnonzero(complete & (found.values > noise))
        order = order[np.argsort(-found.values[order], kind="stable")]
        owners = np.asarray(chunk_document[found.ids[order]])
        _, first = np.unique(owners, return_index=True)
        first = np.sort(first)  # each document's best chunk, best document first
        first = first[~np.isin(owners[first], weighted)]
        everything = wanted >= design.n_chunks or (floor <= noise and found.complete <= floor)
        # one more than needed: whether the last one is tied shows only with the next
        if len(first) > top - ranked or everything:
            break
        wanted *= 8
    best = order[first]
    ranks = ranked + mid_ranks(found.values[best])
    return [
        Hit(
            rank=float(rank),
            document=int(owners[at]),
            influence=0.0,
            share=0.0,
            sign="supports",
            chunk=int(found.ids[order[at]]),
            backfilled=True,
        )
        for rank, at in zip(ranks[: top - ranked], first[: top - ranked], strict=True)
    ]
