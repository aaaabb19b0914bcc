"""Measure where a ranking puts known causes: Recall@k, MRR and AUPRC, with ties.

Documents of one score have no order, and none is made up for them: every measure is its expected value over
all orders of the tied documents, each as likely. A method that scores nothing gets what chance gets, and a
method gains nothing by rounding its scores, or by which document stands first in the corpus.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Places:
    """Places of one query's causes in one ranking: all that the measures need.

    Attributes
    ----------
    above : (R,) int64      documents of a higher score than each cause
    level : (R,) int64      documents of the same score, the cause among them
    total : int             documents that are ranked
    """

    above: np.ndarray
    level: np.ndarray
    total: int

    @classmethod
    def of(cls, scores: np.ndarray, causes: Sequence[int] | np.ndarray) -> Places:
        """Find them from the scores of all documents, (D,), and the numbers of the causes."""
        ordered = np.sort(scores)
        values = scores[np.asarray(causes, np.int64)]
        above = len(ordered) - np.searchsorted(ordered, values, side="right")
        below = np.searchsorted(ordered, values, side="left")
        return cls(above.astype(np.int64), (len(ordered) - above - below).astype(np.int64), len(ordered))

    @property
    def ranks(self) -> np.ndarray:
        """Mid-ranks from 1 = highest, (R,) float64."""
        return self.above + (self.level + 1) / 2

    def recall_at(self, k: int) -> float:
        """Expect the share of the causes among the first k documents."""
        return float(np.clip((k - self.above) / self.level, 0, 1).mean())

    def reciprocal_rank(self) -> float:
        """Expect 1 / rank of the first cause."""
        first = int(self.above.min())
        causes = int((self.above == first).sum())
        size = int(self.level[self.above == first][0])
        # P(the first of the level's causes is its j-th document), j = 1 … size − causes + 1
        places = np.arange(1, size - causes + 2)
        later = (size - places[:-1] - causes + 1) / (size - places[:-1])
        chance = causes / size * np.cumprod(np.concatenate([[1.0], later]))
        return float((chance / (first + places)).sum())

    def average_precision(self) -> float:
        """Expect the area under the precision–recall curve: mean over the causes of the precision at each.

        Without ties, what scikit-learn's `average_precision_score` gives; that one takes tied documents in
        one step.
        """
        found, area = 0, 0.0
        for above in np.unique(self.above):
            there = self.above == above
            causes, size = int(there.sum()), int(self.level[there][0])
            # the j-th document of the level is a cause with probability causes / size; if so, of the j − 1
            # before it in the level (causes − 1) / (size − 1) are expected to be causes
            harmonic = float((1.0 / (above + np.arange(1, size + 1))).sum())
            before = (causes - 1) / (size - 1) * (size - (above + 1) * harmonic) if size > 1 else 0.0
            area += causes / size * ((found + 1) * harmonic + before)
            found += causes
        return area / len(self.above)


def measure_names(ks: Sequence[int]) -> list[str]:
    """List the measures of `measure_all`, in order: "recall@k" for every k, "mrr", "auprc"."""
    return [*(f"recall@{k}" for k in ks), "mrr", "auprc"]


def measure_all(places: Places, ks: Sequence[int]) -> dict[str, float]:
    """Compute every measure of one query's causes, by name; see `measure_names`."""
    found = {f"recall@{k}": places.recall_at(k) for k in ks}
    return {**found, "mrr": places.reciprocal_rank(), "auprc": places.average_precision()}
