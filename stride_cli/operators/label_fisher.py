"""The Fisher matrix with every label counted by its probability, for models with few classes.

One drawn label a chunk estimates it badly where the model is confident: of 2,000 digits that an MLP has
learnt, a handful draw a wrong label, and these rows are all there is of the matrix. With n·C gradients it is
exact. (MNIST MLP, n = 2,000: LDS .34 with drawn labels, .41 with all.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from stride_cli.errors import NumericalError, UsageError
from stride_cli.operators.batches import Batch, ChunkReader
from stride_cli.operators.gradients import gate_gradients
from stride_cli.operators.spaces import OperatorSpace
from stride_cli.output import progress
from stride_cli.randomness import stream

if TYPE_CHECKING:
    from stride_cli.models.adapter import CausalLM

MAX_GATES = 10_000  # p × p float64 is 800 MB
_MAX_GRADIENTS = 1 << 17  # more chunks than this over the number of classes are sampled


def label_fisher(
    model: CausalLM,
    spaces: Sequence[OperatorSpace],
    layer: int,
    chunks: ChunkReader,
    *,
    batch_tokens: int,
    seed: int,
) -> list[torch.Tensor]:
    """``F = mean_i Σ_c p_c(z_i) g_ic g_icᵀ`` of every space, g_ic the gate gradient of label c.

    Parameters
    ----------
    model : a classifier, in which each chunk is (input, label) and the label is not read
    spaces : sequence of OperatorSpace
    layer : int
    chunks : ChunkReader
    batch_tokens : int
    seed : int             draws the chunks, where all would take too long

    Returns
    -------
    list of (p, p) float64

    Raises
    ------
    UsageError             chunks of more than one label, or a space of more than MAX_GATES gates
    NumericalError         F is not finite
    """
    largest = max(space.gate_size for space in spaces)
    if largest > MAX_GATES:
        raise UsageError(
            f"the exact Fisher matrix of {largest:,} gates is too large (at most {MAX_GATES:,})",
            fix="give a smaller --rank, or --curvature kronecker",
        )
    if not (chunks.lengths == 2).all():
        raise UsageError("--curvature exact is for classifiers", fix="use --curvature kronecker or fisher")
    classes = model.vocab_size
    count = min(chunks.n_chunks, max(256, _MAX_GRADIENTS // classes))
    rows = np.sort(stream(seed, "label fisher").permutation(chunks.n_chunks)[:count])
    found = [torch.zeros(space.gate_size, space.gate_size, dtype=torch.float64) for space in spaces]
    with progress("Fisher matrix", count, unit="chunks") as bar:
        for batch in chunks.batches(batch_tokens, rows):
            weighted: list[list[torch.Tensor]] = [[] for _ in spaces]
            for label in range(classes):
                ids = batch.ids.clone()
                ids[:, 1] = label
                gradients, _, loss = gate_gradients(
                    model, spaces, layer, Batch(batch.rows, ids, batch.weights)
                )
                root = torch.exp(-loss / 2)[:, None]  # √p_c
                for kept, gradient in zip(weighted, gradients, strict=True):
                    kept.append(gradient * root.to(gradient.dtype))
            for total, parts in zip(found, weighted, strict=True):
                all_labels = torch.cat(parts)
                total += (all_labels.T @ all_labels).double().cpu()
            bar.advance(len(batch.rows))
    for total in found:
        total /= count
        if not bool(torch.isfinite(total).all()):
            raise NumericalError(
                "the Fisher matrix is not finite", fix="check the model, or run with --dtype fp32"
            )
    return found


def root_rows(fisher: torch.Tensor) -> torch.Tensor:
    """Rows R (p, p) float32 with ``RᵀR / p = F``, as `closed.solve_gates` takes them."""
    values, vectors = torch.linalg.eigh(fisher)
    return ((values.clamp_min(0) * len(values)).sqrt() * vectors).T.float().contiguous()
