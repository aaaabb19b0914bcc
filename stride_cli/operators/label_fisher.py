"""The Fisher matrix with every label counted by its probability, for models with few classes.

One drawn label a chunk estimates it badly where the model is confident: of 2,000 digits that an MLP has
learnt, a handful draw a wrong label, and these rows are all there is of the matrix. With n·C gradients it is
exact. (MNIST MLP, n = 2,000: LDS .34 with drawn labels, .41 with all.)
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from stride_cli.data.batches import ChunkReader
from stride_cli.errors import NumericalError, UsageError
from stride_cli.operators.gradients import assemble, label_signals
from stride_cli.operators.steered_model import SteeredModel
from stride_cli.output import progress
from stride_cli.randomness import stream

MAX_GATES = 10_000  # p × p float64 is 800 MB
_FLOATS = 1 << 25  # of gate gradients held at once
_MAX_GRADIENTS = 1 << 17  # more chunks than this over the number of classes are sampled


def label_fisher(
    steered: SteeredModel, chunks: ChunkReader, *, batch_tokens: int, seed: int
) -> list[torch.Tensor]:
    """``F = mean_i Σ_c p_c(z_i) g_ic g_icᵀ`` of every space, g_ic the gate gradient of label c.

    Of gates inside the blocks only the diagonal: their bases are the eigenvectors of a Kronecker product, in
    which it is the best correction of the eigenvalues (EK-FAC; George et al. 2018, arXiv:1806.03884).

    Parameters
    ----------
    steered : a classifier, in which each chunk is (input, label) and the label is not read
    chunks : ChunkReader
    batch_tokens : int
    seed : int             draws the chunks, where all would take too long

    Returns
    -------
    list of (p, p) float64 on the CPU, or of (p,) for spaces of `diagonal_fisher`

    Raises
    ------
    UsageError             chunks of more than one label, or a space of more than MAX_GATES gates
    NumericalError         F is not finite
    """
    spaces = steered.spaces
    whole = [space for space in spaces if not space.diagonal_fisher]
    largest = max((space.gate_size for space in whole), default=0)
    if largest > MAX_GATES:
        raise UsageError(
            f"the exact Fisher matrix of {largest:,} gates is too large (at most {MAX_GATES:,})",
            fix="give a smaller --rank, or --curvature kronecker",
        )
    if not (chunks.lengths == 2).all():
        raise UsageError("--curvature exact is for classifiers", fix="use --curvature kronecker or fisher")
    count = min(chunks.n_chunks, max(256, _MAX_GRADIENTS // steered.model.vocab_size))
    rows = np.sort(stream(seed, "label fisher").permutation(chunks.n_chunks)[:count])
    double: dict[str, Any] = {"dtype": torch.float64, "device": steered.model.device}
    found = [torch.zeros((space.gate_size,) * (2 if space in whole else 1), **double) for space in spaces]
    at_once = max(1, _FLOATS // max(1, sum(space.gate_size for space in whole)))
    with progress("Fisher matrix", count, unit="chunks") as bar:
        for batch in chunks.batches(min(batch_tokens, 2 * at_once), rows):
            for seen, probability in label_signals(steered, batch):
                gradients = iter(assemble(whole, seen))
                for total, space in zip(found, spaces, strict=True):
                    if space.diagonal_fisher:
                        own = space.mean_squares(seen, probability)
                    else:
                        gradient = next(gradients)
                        own = gradient.T @ (gradient * probability.to(gradient.dtype))
                    total += own.double()
            bar.advance(len(batch.rows))
    for total in found:
        total /= count
        if not bool(torch.isfinite(total).all()):
            raise NumericalError(
                "the Fisher matrix is not finite", fix="check the model, or run with --dtype fp32"
            )
    return [total.cpu() for total in found]


def solve_exact(
    mean_gradients: torch.Tensor,
    fisher: torch.Tensor,
    *,
    damping: float,
    time: float | None = None,
    stability: float = 1.0,
) -> torch.Tensor:
    """``(λ_stab F + γ I)⁻¹ ḡ_k``, or how far training gets towards it, for every subset.

    Parameters
    ----------
    mean_gradients : (K, p) float32      ḡ = D⁻¹ M G; may be overwritten
    fisher : (p, p) float64, or (p,)     F, or its diagonal
    damping : float                      γ / (mean eigenvalue of λ_stab F)
    time : float, optional
        Instead of a damping, Σ of learning rates of the training: direction by direction of curvature λ,
        ``(1 − exp(−λ time)) / λ``, what gradient flow reaches in that time (Bae et al. 2024,
        arXiv:2405.12186). A network that was trained for long has 1 / λ, one that was not, only `time`.
    stability : float                    λ_stab

    Returns
    -------
    Tensor (K, p) float32

    Raises
    ------
    NumericalError      F is zero
    """
    if fisher.ndim == 1:
        values, vectors = fisher * stability, None
    else:
        values, vectors = torch.linalg.eigh(fisher * stability)
        values = values.clamp_min(0)
    if not float(values.sum()) > 0:
        raise NumericalError(
            "the Fisher matrix is zero (expected a positive trace): no gate changes the model's output",
            fix="steer in another space (--space) or check the model",
        )
    if time is None:
        reached = 1 / (values + damping * values.mean())
    else:
        tiny = values * time < 1e-9
        reached = torch.where(tiny, time, -torch.expm1(-values * time) / values.clamp_min(1e-300))
    if vectors is None:
        return mean_gradients.mul_(reached.float())
    return (((mean_gradients.double() @ vectors) * reached) @ vectors.T).float()
