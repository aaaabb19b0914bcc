"""How far a recovery can be trusted, from random halves of the subsets: no model is retrained.

Half of the subsets are a design of their own, and the Lasso on them a second opinion. A document that comes
out on top of nearly every half is there for a reason; one that comes and goes is there by the luck of the
design (stability selection: Meinshausen and Bühlmann, JRSS B 72, 2010; complementary halves: Shah and
Samworth, JRSS B 75, 2013). And what a half predicts of the subsets that it has not seen says how much of the
query's responses sparse influences can carry. R² on the subsets that were seen does not say that: with half
as many weights as subsets it is highest for queries that nothing explains.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from stride_cli.errors import UsageError
from stride_cli.randomness import stream
from stride_cli.recovery import kernels
from stride_cli.recovery.problem import LassoSettings, Solution
from stride_cli.recovery.ranking import Hit, document_influences, mid_ranks
from stride_cli.recovery.screening import Design
from stride_cli.recovery.several import solve_models

if TYPE_CHECKING:
    from index_format.reader import Index

FEWEST_SUBSETS = 8
QUICK, _QUICK_CHUNKS = 4, 1_000_000
_ROWS = 1 << 20  # chunks whose documents are looked at together
TOLERANCE = 1e-3  # of a half's duality gap; the top ten are those of 1e-6 in 99.9 % of cases


def quick_halves(index: Index) -> int:
    """How many halves every answer's reliability is worth: 4 tell as much as 20 (of a query's true LDS), and
    take a tenth of a second at a million chunks; none beyond that, or of few subsets."""
    return QUICK if index.n_chunks <= _QUICK_CHUNKS and index.n_subsets >= FEWEST_SUBSETS else 0


@dataclass(frozen=True)
class Halves:
    """Second opinions on one query.

    Attributes
    ----------
    kept : (B, C K) bool             subsets of each half, of C models; 2b and 2b + 1 share none
    solutions : list of B Solution
    reliability : float in [0, 1]    mean over halves of the correlation (Pearson) between the responses of
                                     the subsets left out and what the half's weights predict of them; 0
                                     where that is negative
    """

    kept: np.ndarray
    solutions: list[Solution]
    reliability: float


def draw_halves(n_subsets: int, draws: int, seed: int, model: int = 0) -> np.ndarray:
    """(B, K) bool: random halves of a model's subsets, in pairs that complement each other.

    Raises
    ------
    UsageError      fewer than one half, or fewer than eight subsets
    """
    if draws < 1:
        raise UsageError(f"{draws} halves of the subsets (expected 1 or more)", fix="try --halves 20")
    if n_subsets < FEWEST_SUBSETS:
        raise UsageError(
            f"half of {n_subsets} subsets says nothing (expected {FEWEST_SUBSETS} subsets or more)",
            fix="leave --stability out, or build the index with more --subsets",
        )
    kept = np.zeros((draws, n_subsets), bool)
    for pair in range((draws + 1) // 2):
        order = stream(seed, "stability", pair, *([model] if model else [])).permutation(n_subsets)
        kept[2 * pair, order[: n_subsets // 2]] = True
        if 2 * pair + 1 < draws:
            kept[2 * pair + 1, order[n_subsets // 2 :]] = True
    return kept


def solve_halves(
    columns: Sequence[Any],
    y: np.ndarray,
    settings: LassoSettings = LassoSettings(),
    *,
    n_subsets: int,
    seed: int,
    draws: int = 20,
) -> list[Halves]:
    """Each query's Lasso on each of B random halves of the subsets, with the bits of each query alone; the
    design is read for all of them.

    Parameters
    ----------
    columns, n_subsets : C designs (n, d) of K subsets each
    y : (Q, C K) float                    as for `solve_models`
    settings : LassoSettings              λ is the same share of each half's own λ_max; solved to `TOLERANCE`
    seed : int      of the streams ("stability", pair)
    draws : int     B

    Raises
    ------
    UsageError         see `draw_halves`
    NumericalError     see `solve_lasso`
    """
    kept = np.hstack([draw_halves(n_subsets, draws, seed, model) for model in range(len(columns))])
    measured = np.asarray(y, np.float64)
    solutions = solve_models(
        columns,
        np.repeat(measured, draws, axis=0),
        replace(settings, tolerance=TOLERANCE),
        n_subsets=n_subsets,
        kept=np.tile(kept, (len(measured), 1)),
    )
    designs = [Design(own, n_subsets) for own in columns]
    halves = []
    for query, own in enumerate(measured):
        part = solutions[query * draws : (query + 1) * draws]
        found = [_left_out(designs, half, rows, own) for half, rows in zip(part, kept, strict=True)]
        halves.append(Halves(kept, part, float(np.clip(np.mean(found), 0.0, 1.0))))
    return halves


def _left_out(designs: Sequence[Design], half: Solution, kept: np.ndarray, y: np.ndarray) -> float:
    """Correlation of y with M w over the rows that were not kept; 0 where either is constant."""
    predicted = np.zeros(len(y))
    for part, design in zip(np.split(predicted, len(designs)), designs, strict=True):
        kernels.subtract_columns_kernel(design.rows(half.indices), -half.values, part)
    sides = predicted[~kept], np.asarray(y, np.float64)[~kept]
    if any(np.ptp(side) == 0.0 for side in sides):
        return 0.0
    left, right = ((side - side.mean()) / np.ptp(side) for side in sides)
    return float(left @ right / np.sqrt((left @ left) * (right @ right)))


def with_stability(
    halves: Halves, columns: Any, chunk_document: np.ndarray, hits: list[Hit], *, top: int, sign: int
) -> list[Hit]:
    """Hits, of one sign, with the `document_stability` of their documents; None where it is not measured."""
    if not hits:
        return []
    documents = np.array([hit.document for hit in hits], np.int64)
    found = document_stability(halves, columns, chunk_document, documents, top=top, sign=sign)
    known = [None if np.isnan(value) else float(value) for value in found]
    return [replace(hit, stability=value) for hit, value in zip(hits, known, strict=True)]


def document_stability(
    halves: Halves,
    columns: Any,
    chunk_document: np.ndarray,
    documents: np.ndarray,
    *,
    top: int,
    sign: int = 1,
) -> np.ndarray:
    """Share of the halves in which each document is among the `top` that support (or oppose) most.

    Parameters
    ----------
    columns : (n, d)                the design
    chunk_document : (n,) int64     document of each chunk
    documents : (D,) int64          which to look at, distinct
    top : int                       t; a document is among them where its mid-rank is at most t
    sign : +1 supporters, −1 opposers

    Returns
    -------
    ndarray (D,) float64, in [0, 1]
        Of the halves that measure some chunk of the document, in one subset or more; NaN where none does.
    """
    documents = np.asarray(documents, np.int64)
    order = np.argsort(documents)
    # part by part: the documents of all chunks may be more than memory should hold
    chunks = np.concatenate(
        [
            start + np.flatnonzero(np.isin(chunk_document[start : start + _ROWS], documents))
            for start in range(0, max(1, len(chunk_document)), _ROWS)
        ]
    )
    owner = order[np.searchsorted(documents[order], np.asarray(chunk_document[chunks]))]
    subsets = Design(columns, halves.kept.shape[1]).rows(chunks)
    there, measured = np.zeros(len(documents)), np.zeros(len(documents))
    for half, kept in zip(halves.solutions, halves.kept, strict=True):
        seen = np.zeros(len(documents), bool)
        seen[owner[kept[subsets].any(axis=1)]] = True
        measured += seen
        found, influence, least = document_influences(half, chunk_document)
        chosen = np.flatnonzero(sign * influence > least)
        chosen = chosen[np.argsort(-sign * influence[chosen], kind="stable")]
        best = found[chosen[mid_ranks(influence[chosen]) <= top]]
        there += np.isin(documents, best) & seen
    with np.errstate(invalid="ignore"):
        return there / np.where(measured > 0, measured, np.nan)
