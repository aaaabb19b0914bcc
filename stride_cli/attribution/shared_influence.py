"""The part of a query's influences that many chunks have alike is shared out among them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from stride_cli.operators.redundancy import Redundancy


@dataclass(frozen=True)
class Shared:
    """What is taken from the influences of one query: V (Λ / (Λ + ridge + 1)) Vᵀ w, the mean over models.

    Attributes
    ----------
    directions : of each model
    weights : of each, (k,) float64      (Λ / (Λ + ridge + 1)) Vᵀ w over their number
    """

    directions: Sequence[Redundancy]
    weights: Sequence[np.ndarray]

    @classmethod
    def of(
        cls,
        directions: Sequence[Redundancy],
        ridge: float,
        seen: Sequence[tuple[np.ndarray, np.ndarray, float]],
    ) -> Shared:
        """From influences of all chunks, or of samples of them.

        Parameters
        ----------
        directions : of each model
        ridge : γ, in chunks
        seen : (t,) chunks, (t,) float64 their influences, and how many chunks each stands for
        """
        weights = []
        for each in directions:
            total = np.zeros(len(each.values))
            for chunks, influences, stands_for in seen:
                total += stands_for * (influences @ np.asarray(each.vectors[chunks], np.float64))
            weights.append(total * each.values / (each.values + ridge + 1.0) / len(directions))
        return cls(directions, weights)

    def __getitem__(self, chunks: slice | np.ndarray, /) -> np.ndarray:
        """Of a range of chunks or of given ones, float64; the mean over all is 0, as that of influences."""
        found = None
        for each, weights in zip(self.directions, self.weights, strict=True):
            own = np.asarray(each.vectors[chunks]) @ weights.astype(np.float32) - each.means @ weights
            found = own if found is None else found + own
        return np.asarray(found, np.float64)
