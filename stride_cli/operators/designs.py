"""The subsets that operators answer for: the design matrix, and one like it for each further checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from index_format.design import build_columns, row_sizes
from stride_cli.randomness import torch_seed

if TYPE_CHECKING:
    from index_format.reader import Index


def design_seed(seed: int, number: int) -> int:
    """Derive the seed of the subsets of checkpoint 1, 2, …"""
    return torch_seed(seed, "design of checkpoint", number)


@dataclass(frozen=True)
class Designs:
    """Subsets of chunks; of several checkpoints, those of the first, of the second, and so on.

    Attributes
    ----------
    columns : (n, C d) unsigned        the subsets of each chunk, those of checkpoint c from c·K
    row_sizes : (K,) or (C, K) int64   |A_k|
    n_subsets : int                    C·K
    each : the columns (n, d) of every checkpoint's own design, of K subsets
    """

    columns: Any
    row_sizes: np.ndarray
    n_subsets: int
    each: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        if not self.each:
            object.__setattr__(self, "each", (self.columns,))

    @classmethod
    def of(cls, index: Index, seed: int | None = None) -> Designs:
        """Read the index's own, or draw one like it from another seed."""
        if seed is not None:
            return cls.drawn(index.n_chunks, index.n_subsets, index.degree, seed)
        sizes = np.diff(index.array("design/row_offsets"))
        return cls(index.array("design/columns"), sizes, index.n_subsets)

    @classmethod
    def drawn(cls, n_chunks: int, n_subsets: int, degree: int, seed: int) -> Designs:
        """Draw a random one; ValueError as `index_format.design.build_columns`."""
        columns = build_columns(0, n_chunks, n_subsets=n_subsets, degree=degree, seed=seed)
        return cls(columns, row_sizes(columns, n_subsets), n_subsets)

    @classmethod
    def stacked(cls, designs: Sequence[Designs]) -> Designs:
        """Stack several of the same K to one of C·K subsets."""
        if len(designs) == 1:
            return designs[0]
        each = designs[0].n_subsets
        dtype = np.uint16 if len(designs) * each <= 1 << 16 else np.uint32
        n_chunks, degree = designs[0].columns.shape
        columns = np.empty((n_chunks, len(designs) * degree), dtype)
        for number, design in enumerate(designs):
            part = columns[:, number * degree : (number + 1) * degree]
            np.add(np.asarray(design.columns), dtype(number * each), out=part, dtype=dtype, casting="unsafe")
        sizes = np.stack([design.row_sizes for design in designs])
        parts = tuple(design.columns for design in designs)
        return cls(columns, sizes, len(designs) * each, each=parts)
