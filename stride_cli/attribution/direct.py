"""Exact gradients: the influence of single chunks in gate space, from their own gradients.

`measure_linear` says of a subset the mean of what these say of its chunks. With P_i = scored_i g_i · g_x, in
the unit of what is recovered (`pipeline.additive_measurement`):

    w_i = a P_i − b,      a = s / (m̄ · typical · λ_stab)

m̄ is the subsets' mean size, s what the responses were multiplied by (1 unless several models are averaged),
and b the mean over all chunks, which the subsets' responses tell; 0 where the recovery fits no intercept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from stride_cli.errors import UsageError
from stride_cli.operators.gradients import gradient_products, joined
from stride_cli.operators.linear_response import gradients_with_loss
from stride_cli.output import progress

if TYPE_CHECKING:
    from stride_cli.data.batches import Batch, ChunkReader
    from stride_cli.data.workspace import Workspace
    from stride_cli.operators.steered_model import SteeredModel
    from stride_cli.operators.store import Operators


@dataclass(frozen=True)
class Exact:
    """Exact products of some chunks with a query, by their own gradients.

    Attributes
    ----------
    chunks : (t,) int64                ascending; may be none
    products : (t,) float64            P
    factor, offset : float             a, b
    taken : (t,) float64 or float      what near-duplicates share, which counts once
    """

    chunks: np.ndarray
    products: np.ndarray
    factor: float
    offset: float
    taken: np.ndarray | float = 0.0

    @property
    def influences(self) -> np.ndarray:
        """w, (t,) float64."""
        return self.factor * self.products - self.offset - self.taken


def direct_scale(operators: Operators) -> float:
    """Return 1 / λ_stab, the factor of a chunk's gate gradient in the unit of the gates.

    Raises
    ------
    UsageError      the operators' gates are not what single chunks' gradients add up to
    """
    if operators.direct_scale is None:
        raise UsageError(
            "--read reads single chunks in the gates' own units, which these operators do not have",
            fix="fit a language model's by the default (stride train --overwrite), or read none (--read 0)",
        )
    return operators.direct_scale


def query_gradients(steered: SteeredModel, batches: Sequence[Batch]) -> list[torch.Tensor]:
    """Compute gate gradients of queries, one (Q, p) float32 on the CPU a space."""
    found = [gradients_with_loss(steered, batch)[0] for batch in batches]
    return [joined(parts) for parts in zip(*found, strict=True)]


def exact_products(
    steered: SteeredModel, batches: Sequence[Batch], chunks: ChunkReader, rows: np.ndarray
) -> np.ndarray:
    """Compute P of chunks `rows` (t,), distinct, on each of the Q queries in `batches`: (Q, t) float64."""
    asked = query_gradients(steered, batches)
    if not len(rows):
        return np.zeros((len(asked[0]), 0))
    with progress("reading chunks", len(rows), unit="chunks") as bar:
        found = gradient_products(steered, asked, chunks, rows, advance=bar.advance)
    products: np.ndarray = chunks.typical * found.sum(axis=0)
    return products


def influence_unit(operators: Operators, workspace: Workspace, row_sizes: np.ndarray) -> float:
    """Return a where s is 1.

    Parameters
    ----------
    operators : Operators           of the model; chunks that were appended since their fit do not count
    row_sizes : (K,)                |A_k|

    Raises
    ------
    UsageError      see `direct_scale`
    """
    from stride_cli.training.dry_run import FirstChunks

    fitted, chunks = len(operators.seen), workspace.chunks
    typical = chunks.typical if fitted == chunks.n_chunks else FirstChunks(workspace.index, fitted).typical
    mean_size = max(1.0, float(np.asarray(row_sizes, np.float64).mean()))
    return direct_scale(operators) / (typical * mean_size)
