"""The definitions of app:metrics that need nothing but scores and measured losses: NumPy and SciPy only.

Scores are positive where a chunk supports a query; the truth they are compared with is −loss, or the margin.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from stride_cli.errors import NumericalError, UsageError
from stride_cli.randomness import stream

FEWEST_SUBSETS = 3  # two points always lie on a line
ENOUGH_SUBSETS = 30  # below, the interval over subsets is itself a rough guess
_COLUMNS = 1 << 13  # chunks of a mask that are cast to float64 at a time
_SPLITS = 64


@dataclass(frozen=True)
class Correlations:
    """Agreement of predicted and measured responses over R subsets, query by query.

    Attributes
    ----------
    spearman, pearson, kendall : (Q,) float64, in [−1, 1]
        0 where either side is constant over the subsets: a constant predicts nothing.
    constant : (Q,) bool
        Where the prediction is constant (all scores zero, say).
    """

    spearman: np.ndarray
    pearson: np.ndarray
    kendall: np.ndarray
    constant: np.ndarray

    def __len__(self) -> int:
        return len(self.spearman)


def measured_response(losses: np.ndarray, margins: np.ndarray | None = None) -> np.ndarray:
    """Average the responses of retrained models over seeds, in the sign of scores.

    Parameters
    ----------
    losses : (R, S, Q) float64      nats per scored token
    margins : (R, S, Q) float64, optional      used instead, where given (logit of the label − logsumexp of
        the others)

    Returns
    -------
    (Q, R) float64, −loss or +margin

    Raises
    ------
    NumericalError      a value is not finite
    """
    values = -np.asarray(losses, np.float64) if margins is None else np.asarray(margins, np.float64)
    if not np.isfinite(values).all():
        raise NumericalError(
            "a measured loss of the retrained models is not finite",
            fix="train the base model with a smaller learning rate, and measure the truth anew",
        )
    return values.mean(axis=1).T


def predicted_response(scores: np.ndarray, masks: np.ndarray) -> np.ndarray:
    """Sum the scores of each subset's members (as:additive).

    Parameters
    ----------
    scores : (q, n) floating
    masks : (R, n) bool

    Returns
    -------
    (q, R) float64
    """
    if scores.shape[1] != masks.shape[1]:
        raise ValueError(f"scores are of {scores.shape[1]} chunks, masks of {masks.shape[1]}")
    total = np.zeros((len(scores), len(masks)))
    for start in range(0, masks.shape[1], _COLUMNS):
        block = slice(start, start + _COLUMNS)
        total += scores[:, block].astype(np.float64) @ masks[:, block].T.astype(np.float64)
    return total


def lds(
    scores: np.ndarray, masks: np.ndarray, losses: np.ndarray, margins: np.ndarray | None = None
) -> Correlations:
    """Compute the linear datamodeling score (app:metrics) on held-out subsets.

    Parameters
    ----------
    scores : (Q, n)       > 0 supports
    masks : (R, n) bool
    losses : (R, S, Q)    margins : (R, S, Q), optional, used instead

    Raises
    ------
    UsageError      fewer than three subsets
    """
    return correlate(predicted_response(scores, masks), measured_response(losses, margins))


def correlate(predicted: np.ndarray, measured: np.ndarray) -> Correlations:
    """Compute Spearman's ρ, Pearson's r and Kendall's τ of each row over the subsets.

    Ties have their mid-rank in ρ. τ is the paper's (n_c − n_d) / (R (R − 1) / 2), Kendall's τ_a: a pair that
    is tied on either side counts as neither, and stays in the denominator.

    Parameters
    ----------
    predicted, measured : (Q, R)
    """
    if predicted.shape != measured.shape:
        raise ValueError(f"predicted responses {predicted.shape}, measured ones {measured.shape}")
    if predicted.shape[1] < FEWEST_SUBSETS:
        raise UsageError(
            f"there are {predicted.shape[1]} retrained subsets (expected {FEWEST_SUBSETS} or more)",
            fix="retrain more: stride evaluate truth --subsets 50",
        )
    return Correlations(
        spearman=row_pearson(mid_ranks(predicted), mid_ranks(measured)),
        pearson=row_pearson(predicted, measured),
        kendall=np.array([_kendall(p, m) for p, m in zip(predicted, measured, strict=True)]),
        constant=np.ptp(predicted, axis=1) == 0,
    )


def row_pearson(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Correlate each row by Pearson's r, (Q,) float64; 0 where a row is constant."""
    left, right = (_unit_rows(np.asarray(side, np.float64)) for side in (left, right))
    return np.clip((left * right).sum(axis=1), -1, 1)


def _unit_rows(values: np.ndarray) -> np.ndarray:
    """Centre the rows and scale them to length 1; constant rows become zero."""
    # by the range, not the norm: the mean of equal numbers is not always that number in floating point
    spread = np.ptp(values, axis=1, keepdims=True)
    varied = spread > 0
    scaled = (values - values[:, :1]) / np.where(varied, spread, 1)  # any magnitude, no overflow
    scaled = scaled - scaled.mean(axis=1, keepdims=True)
    norm = np.linalg.norm(scaled, axis=1, keepdims=True)
    return np.where(varied, scaled / np.where(norm > 0, norm, 1), 0.0)


def _kendall(left: np.ndarray, right: np.ndarray) -> float:
    size = len(left)
    agreement = np.sign(left[:, None] - left) * np.sign(right[:, None] - right)  # (R, R), symmetric
    return float(agreement.sum() / (size * (size - 1)))


def partial_spearman(predicted: np.ndarray, measured: np.ndarray, given: np.ndarray) -> np.ndarray:
    """Correlate the ranks of prediction and measurement with a third variable's part removed from both.

        (r_pm − r_pg r_mg) / √((1 − r_pg²) (1 − r_mg²)),     r: Spearman's correlation over the subsets

    Parameters
    ----------
    predicted, measured, given : (Q, R)

    Returns
    -------
    ndarray (Q,) float64; 0 where either side is a function of the third's ranks
    """
    p, m, g = (mid_ranks(side) for side in (predicted, measured, given))
    r_pm, r_pg, r_mg = row_pearson(p, m), row_pearson(p, g), row_pearson(m, g)
    scale = np.sqrt(np.clip(1 - r_pg**2, 0, None) * np.clip(1 - r_mg**2, 0, None))
    return np.where(scale > 1e-6, (r_pm - r_pg * r_mg) / np.where(scale > 1e-6, scale, 1), 0.0)


def noise_ceiling(values: np.ndarray, *, seed: int = 0) -> float | None:
    """Estimate the best LDS that the truth's noise allows, from split halves of its seeds.

    Two halves of the S seeds are correlated over the subsets (Spearman, mean over queries, mean over random
    splits), stepped up to S seeds by Spearman–Brown, ``k r / (1 + (k − 1) r)`` with k = S / ⌊S/2⌋, and the
    root is taken: that reliability is the squared correlation with the noise-free response. A method that
    predicts the noise-free response exactly has this LDS.

    Parameters
    ----------
    values : (R, S, Q)      losses or margins
    seed : int              of the splits

    Returns
    -------
    float, or None: with one seed the noise cannot be told from the response
    """
    n_seeds = values.shape[1]
    if n_seeds < 2:
        return None
    half = n_seeds // 2
    generator = stream(seed, "noise ceiling")
    n_splits = 1 if n_seeds == 2 else _SPLITS
    found = []
    for _ in range(n_splits):
        order = generator.permutation(n_seeds)
        first = values[:, order[:half]].mean(axis=1).T  # (Q, R)
        second = values[:, order[half : 2 * half]].mean(axis=1).T
        found.append(row_pearson(mid_ranks(first), mid_ranks(second)).mean())
    split = max(0.0, float(np.mean(found)))
    step = n_seeds / half
    reliability = min(1.0, step * split / (1 + (step - 1) * split))
    return float(np.sqrt(reliability))


def zero_share(scores: np.ndarray) -> np.ndarray:
    """Compute sparsity (app:metrics), the share of scores that are exactly zero, (q,) float64 of (q, n)."""
    return (scores == 0).mean(axis=1)


def gini(scores: np.ndarray) -> np.ndarray:
    """Compute the Gini coefficient of |w| (app:metrics), (q,) float64 of (q, n); NaN where all are zero.

    Σ_i Σ_j ||w_i| − |w_j|| / (2 n Σ|w_i|), by sorting: Σ_i (2 i − n − 1) |w|_(i) / (n Σ|w_i|), ascending.
    Never below the share of zeros.
    """
    size = np.sort(np.abs(scores).astype(np.float64), axis=1)
    n = scores.shape[1]
    total = size.sum(axis=1)
    weights = 2 * np.arange(1, n + 1) - n - 1
    with np.errstate(invalid="ignore"):
        return (size @ weights) / (n * total)


def top_coverage(scores: np.ndarray, share: float = 0.1) -> np.ndarray:
    """Compute the part of Σ|w| that the ⌊share · n⌋ largest |w| hold (app:metrics), (q,); NaN without any."""
    size = np.abs(scores).astype(np.float64)
    n = scores.shape[1]
    # ⌊0.1 n⌋ as meant, not as rounded: 0.7 * 10 is 6.999…
    count = int(np.floor(share * n + 1e-9))
    total = size.sum(axis=1)
    top = np.partition(size, n - count, axis=1)[:, n - count :].sum(axis=1) if count else np.zeros(len(size))
    with np.errstate(invalid="ignore"):
        return top / total


def active_set(scores: np.ndarray) -> np.ndarray:
    """Count |A| (app:metrics), the scores that are not zero: (q,) int64 of (q, n)."""
    return np.count_nonzero(scores, axis=1)


def descending_mid_ranks(scores: np.ndarray) -> np.ndarray:
    """Rank from 1 = highest along the last axis, float64; ties share their mid-rank."""
    return mid_ranks(-np.asarray(scores, np.float64))


def mid_ranks(values: np.ndarray) -> np.ndarray:
    """Rank from 1 = lowest along the last axis, float64; ties share their mid-rank."""
    from scipy.stats import rankdata  # takes half a second to import

    ranks: np.ndarray = rankdata(values, axis=-1)
    return ranks


def unigram_f1(prediction: str, reference: str) -> float:
    """Compute F1 of the words of two strings, lowercased, split at white space (app:selection_metrics).

    0 where either has no word, 1 where neither has.
    """
    found, wanted = prediction.lower().split(), reference.lower().split()
    if not found or not wanted:
        return float(found == wanted)
    overlap = sum((Counter(found) & Counter(wanted)).values())
    precision, recall = overlap / len(found), overlap / len(wanted)
    return 2 * precision * recall / (precision + recall) if overlap else 0.0
