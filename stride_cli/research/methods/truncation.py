"""Scores cut to each query's strongest, or shrunk as STRIDE's are: `top=100`, `shrink=true`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from stride_cli.errors import UsageError

if TYPE_CHECKING:
    from stride_cli.data.query_set import QuerySet
    from stride_cli.data.workspace import Workspace
    from stride_cli.research.methods.protocol import Method


def shrink_scores(block: np.ndarray) -> np.ndarray:
    """Shrink small scores, as `stride query` does in pre-training: (q, n) float32.

    Each query's mean is taken off first, so that what every chunk has in common counts as nothing.

    Parameters
    ----------
    block : (q, n) float32
    """
    from stride_cli.attribution.defaults import SHRINKAGE
    from stride_cli.recovery.shrinkage import shrink

    return shrink(block - block.mean(axis=1, keepdims=True, dtype=np.float64), SHRINKAGE).astype(np.float32)


def keep_top(block: np.ndarray, top: int) -> np.ndarray:
    """Set all scores to zero but the ``top`` of largest magnitude in each row.

    Magnitude, since a sum over a subset loses least that way, and since it needs no sign: scores that are all
    negative (log-likelihood ratios) keep their order. Of equal magnitudes the earlier chunk stays.

    Parameters
    ----------
    block : (q, n) float32
    top : int      1 or more; n or more keeps everything
    """
    if top >= block.shape[1]:
        return block
    kept = np.zeros_like(block)
    for row, scores in zip(kept, block, strict=True):
        magnitude = np.abs(scores)
        limit = np.partition(magnitude, len(scores) - top)[len(scores) - top]
        above = np.flatnonzero(magnitude > limit)
        level = np.flatnonzero(magnitude == limit)[: top - len(above)]
        chosen = np.concatenate([above, level])
        row[chosen] = scores[chosen]
    return kept


class Truncated:
    """A method whose scores are shrunk (``shrink``), cut to each query's ``top`` strongest, or both."""

    def __init__(self, method: Method, top: int | None = None, *, shrink: bool = False) -> None:
        if top is not None and top < 1:
            raise UsageError(f"top should be 1 or more, found {top}")
        self._method = method
        self.top, self.shrink = top, shrink
        self.name = method.name
        self.bytes_per_chunk = method.bytes_per_chunk

    def fit(self, workspace: Workspace) -> None:
        self._method.fit(workspace)
        self.bytes_per_chunk = self._method.bytes_per_chunk

    def score(self, queries: QuerySet) -> Iterator[np.ndarray]:
        for block in self._method.score(queries):
            if self.shrink:
                block = shrink_scores(block)
            yield block if self.top is None else keep_top(block, self.top)

    def __getattr__(self, attribute: str) -> Any:
        """Pass on the method's other attributes, such as `used_truth_rows`."""
        if attribute.startswith("_"):
            raise AttributeError(attribute)
        return getattr(self._method, attribute)
