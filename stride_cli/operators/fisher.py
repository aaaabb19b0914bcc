"""Fisher matrices in the gates, where no basis is whitened by them, and the gates that they give.

The bases hold the inverse root of the Fisher matrix of most spaces (`bases`). Two kinds do without: the
paper's diagonal gate (``residual``), whose few gates have no Kronecker product, and classifiers with few
classes. There every label counts by its probability: of 2,000 digits that an MLP has learnt, a handful draw a
wrong label, and these rows would be all there is of the matrix (LDS .34 with drawn labels, .41 with all).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from stride_cli.data.batches import ChunkReader
from stride_cli.errors import NumericalError, UsageError
from stride_cli.operators.bases import label_uniforms
from stride_cli.operators.gradients import assemble, label_signals, signals
from stride_cli.operators.operator_space import OperatorSpace
from stride_cli.operators.steered_model import SteeredModel
from stride_cli.output import progress
from stride_cli.randomness import stream

MAX_GATES = 10_000  # p × p float64 is 800 MB
_DRAWN_CHUNKS = 4096
_FLOATS = 1 << 25  # of gate gradients held at once
_MAX_GRADIENTS = 1 << 17  # more chunks than this over the number of classes are sampled


def drawn_fisher(
    steered: SteeredModel, chunks: ChunkReader, *, batch_tokens: int, seed: int
) -> list[torch.Tensor | None]:
    """Estimate F per scored token from labels drawn from the model, for spaces whose bases do not hold it.

    Returns
    -------
    list of (p, p) float64 on the CPU; None for spaces that whiten

    Raises
    ------
    UsageError             a space of more than MAX_GATES gates
    """
    spaces = [space for space in steered.spaces if not space.whitens]
    _refuse_large(spaces)
    count = min(_DRAWN_CHUNKS, chunks.n_chunks)
    rows = np.sort(stream(seed, "fisher chunks").permutation(chunks.n_chunks)[:count])
    found = {space: torch.zeros((space.gate_size,) * 2, dtype=torch.float64) for space in spaces}
    own = SteeredModel(steered.model, spaces, steered.layer)
    with progress("Fisher matrix", count, unit="chunks") as bar:
        for batch in chunks.batches(batch_tokens, rows):
            seen = signals(own, batch, sampled=label_uniforms(seed, batch))
            # g is a mean over T tokens, and F one over tokens too: Σ_t g_t g_tᵀ / T has the row √T g
            root = batch.scored.sqrt()[:, None]
            for space, gradient in zip(spaces, assemble(spaces, seen), strict=True):
                scaled = (gradient.cpu() * root).double()  # (B, p)
                found[space].addmm_(scaled.T, scaled)
            bar.advance(len(batch.rows))
    return [found[space] / count if space in found else None for space in steered.spaces]


def label_fisher(
    steered: SteeredModel, chunks: ChunkReader, *, batch_tokens: int, seed: int
) -> list[torch.Tensor]:
    """Compute ``F = mean_i Σ_c p_c(z_i) g_ic g_icᵀ`` of a classifier, g_ic the gate gradient of label c.

    Of gates inside the blocks only the diagonal: their bases are the eigenvectors of a Kronecker product, in
    which it is the best correction of the eigenvalues (EK-FAC; George et al. 2018, arXiv:1806.03884).

    Parameters
    ----------
    steered : a classifier, in which each chunk is (input, label) and the label is not read
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
    _refuse_large(whole)
    if not (chunks.lengths == 2).all():
        raise UsageError("--curvature exact is for classifiers", fix="use --curvature kronecker")
    count = min(chunks.n_chunks, max(256, _MAX_GRADIENTS // steered.model.vocab_size))
    rows = np.sort(stream(seed, "label fisher").permutation(chunks.n_chunks)[:count])
    found = [
        torch.zeros(
            (space.gate_size,) * (2 if space in whole else 1),
            dtype=torch.float64,
            device=steered.model.device,
        )
        for space in spaces
    ]
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


def _refuse_large(spaces: Sequence[OperatorSpace]) -> None:
    largest = max((space.gate_size for space in spaces), default=0)
    if largest > MAX_GATES:
        raise UsageError(
            f"the Fisher matrix of {largest:,} gates is too large (at most {MAX_GATES:,})",
            fix="give a smaller --rank, or --curvature kronecker",
        )


def solve_gates(
    mean_gradients: torch.Tensor,
    fisher: torch.Tensor,
    *,
    damping: float,
    time: float | None = None,
    stability: float = 1.0,
    n_rows: int | None = None,
) -> torch.Tensor:
    """Solve ``(λ_stab F + γ I)⁻¹ ḡ_k``, or how far training gets towards it, for every subset.

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
    n_rows : int, optional               gradients that F is made of: it has no more eigenvalues than these

    Returns
    -------
    Tensor (K, p) float32

    Raises
    ------
    NumericalError      F is zero or not finite
    """
    trace = float(fisher.sum() if fisher.ndim == 1 else fisher.trace())
    if not (np.isfinite(trace) and trace > 0):
        raise NumericalError(
            f"the Fisher matrix has trace {trace} (expected a positive number): no gate changes the model's "
            "output",
            fix="steer in another space (--space), at another layer (--layer), or check the model",
        )
    if fisher.ndim == 1:
        values, vectors = fisher * stability, None
    else:
        values, vectors = torch.linalg.eigh(fisher * stability)
        values = values.clamp_min(0)
    if time is None:
        share = min(1.0, (n_rows or len(values)) / len(values))  # of eigenvalues that are not zero
        reached = 1 / (values + damping * values.mean() / share)
    else:
        tiny = values * time < 1e-9
        reached = torch.where(tiny, time, -torch.expm1(-values * time) / values.clamp_min(1e-300))
    if vectors is None:
        return mean_gradients.mul_(reached.float())
    return (((mean_gradients.double() @ vectors) * reached) @ vectors.T).float()
