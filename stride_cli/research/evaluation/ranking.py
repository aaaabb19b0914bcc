"""Highest chunks of a method, ties broken by lot: what interventions remove or train on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from stride_cli.errors import UsageError
from stride_cli.randomness import stream
from stride_cli.research.evaluation.metrics import descending_mid_ranks


def top_chunks(blocks: Iterable[np.ndarray], k: int, *, seed: int = 0) -> np.ndarray:
    """Choose each query's k chunks of highest score, by descending score.

    Ties, of zeros above all, are broken by lot: a chunk's number is no reason to prefer it. The lots are the
    same for all methods.

    Parameters
    ----------
    blocks : of (q, n) floating
    k : int, at most n

    Returns
    -------
    (Q, k) int64
    """
    found: list[np.ndarray] = []
    for block in blocks:
        for scores in block:
            lots = stream(seed, "ties", len(found)).permutation(len(scores))
            limit = np.partition(scores, len(scores) - k)[len(scores) - k]  # the k-th highest
            above = lots[scores[lots] > limit]
            level = lots[scores[lots] == limit][: k - len(above)]
            chosen = np.concatenate([above, level])
            found.append(chosen[np.argsort(-scores[chosen], kind="stable")])
    return np.stack(found).astype(np.int64) if found else np.zeros((0, k), np.int64)


def random_chunks(n_chunks: int, k: int, draws: int, *, seed: int, name: str) -> np.ndarray:
    """Draw sets of k chunks without replacement, (draws, k) int64: the same for every method."""
    return np.stack([stream(seed, name, k, draw).permutation(n_chunks)[:k] for draw in range(draws)])


def check_ks(ks: Sequence[int], n_chunks: int) -> None:
    """Raise UsageError where a k is below 1 or above the number of chunks."""
    for k in ks:
        if not 1 <= k <= n_chunks:
            raise UsageError(f"k is {k}, and there are {n_chunks:,} chunks", fix=f"use 1 to {n_chunks:,}")


def document_scores(block: np.ndarray, chunk_document: np.ndarray, n_documents: int) -> np.ndarray:
    """Sum scores over the chunks of each document, (q, n) → (q, D) float64."""
    return np.stack(
        [np.bincount(chunk_document, weights=row.astype(np.float64), minlength=n_documents) for row in block]
    )


def rank_documents(scores: np.ndarray, top: int) -> list[tuple[float, int, float]]:
    """Rank the documents of highest score that are not zero: (mid-rank among all, document, score).

    Parameters
    ----------
    scores : (D,) floating
    """
    ranks = descending_mid_ranks(scores)
    order = np.argsort(ranks, kind="stable")[:top]
    return [(float(ranks[d]), int(d), float(scores[d])) for d in order if scores[d] != 0]
