"""The closed form: all K operators at once from one pass over the corpus.

For small gates fidelity plus stability is quadratic in the gates of each subset,

    −ḡ_k·a + ½ aᵀ (λ_stab F + γ I) a,      ḡ = D⁻¹ M G,   g_i = −∂loss(z_i)/∂a |_{a=0},

where the loss of chunk i is the sum over its scored tokens (paper, L_fid), in units of the mean chunk,
with F the Hessian of the stability loss KL(base ∥ steered), which at a = 0 is the Fisher matrix. Its minimum
is ``A = (λ_stab F + γ I)⁻¹ D⁻¹ M G``. Two ways to F:

- ``kronecker``: F ≈ A ⊗ S, second moments of the activations and of the gradients of labels drawn from the
  model. Its inverse root is part of the bases (`bases.fit_bases`), so that in the gates F is the identity and
  A = D⁻¹ M G / λ_stab. Costs a sample's second moments, whatever p is. The diagonal gate (``residual``) has
  too few gates for a Kronecker product: its F is estimated from drawn labels (`fisher.drawn_fisher`).
- ``exact``: for classifiers, every label counted by its probability; of gates inside the blocks the diagonal
  in the Kronecker eigenbasis. Here ``A`` can be what training reaches in its own time instead of the minimum,
  with gradients and F averaged over checkpoints along the training (`fisher.solve_gates`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from stride_cli.data.batches import ChunkReader
from stride_cli.models.loading import Opener
from stride_cli.operators.bases import fit_bases
from stride_cli.operators.corpus_pass import go_over_corpus
from stride_cli.operators.fisher import drawn_fisher, label_fisher, solve_gates
from stride_cli.operators.gradient_sums import PassSettings, accumulate
from stride_cli.operators.operator_space import BasisOptions
from stride_cli.operators.spaces import space_classes
from stride_cli.operators.steered_model import SteeredModel, keep_spaces, kept_spaces
from stride_cli.operators.store import Operators
from stride_cli.parallel import return_freed_memory

if TYPE_CHECKING:
    from stride_cli.models.protocol import AttributableModel
    from stride_cli.operators.corpus_pass import PassWorkers


@dataclass(frozen=True)
class ClosedSettings:
    """Settings of the closed form.

    Attributes
    ----------
    spaces : names of the operator spaces
    layer : residual spaces act after this many blocks
    ranks : rank of each space by name
    n_buckets : c of the logit spaces; None for what `fit_bases` chooses
    curvature : "kronecker" or "exact" (classifiers: all labels)
    damping : of both Kronecker factors, or γ, as a multiple of the mean (non-zero) eigenvalue
    time : Σ of learning rates that the model was trained for, in place of a damping (exact)
    trajectory : paths of checkpoints along its training, each with the share of `time` that it stands for;
        the model itself has the rest (exact)
    stability : λ_stab
    residuals : "average": a chunk's tokens count as on average over training (`average_residuals`), or
        "final"
    normalize : chunks' gradients are divided by their lengths to this power (`chunk_gradients`)
    project : bytes that are kept of every chunk's own gradient (`projections`); whitened bases only
    batch_tokens : padded tokens in one forward pass
    seed : names every random stream
    """

    spaces: tuple[str, ...]
    layer: int
    ranks: dict[str, int]
    n_buckets: int | None = None
    curvature: str = "kronecker"
    damping: float = 0.1
    time: float | None = None
    trajectory: tuple[tuple[str, float], ...] = ()
    stability: float = 1.0
    residuals: str = "final"
    normalize: float = 0.0
    project: int = 0
    batch_tokens: int = 4096
    seed: int = 0


def fit_spaces(model: AttributableModel, chunks: ChunkReader, settings: ClosedSettings) -> SteeredModel:
    """Fit the bases that these settings ask for to a model and corpus; chunks' tokens and chunks count as
    the settings say."""
    options = BasisOptions(
        layer=settings.layer,
        ranks=settings.ranks,
        n_buckets=settings.n_buckets,
        seed=settings.seed,
        batch_tokens=settings.batch_tokens,
        damping=settings.damping if settings.curvature == "kronecker" else None,
        all_labels=settings.curvature == "exact",
    )
    # without a damping bases are orthonormal, and F is solved in the gates
    steered = fit_bases(model, chunks, settings.spaces, options)
    return replace(steered, averaged=settings.residuals == "average", normalized=settings.normalize)


def fit_closed(
    model: AttributableModel,
    chunks: ChunkReader,
    columns: np.ndarray,
    n_subsets: int,
    settings: ClosedSettings,
    *,
    scratch: Path | None = None,
    save_seconds: float = 60.0,
    workers: PassWorkers | None = None,
) -> Operators:
    """Fit every operator in closed form.

    Parameters
    ----------
    model : AttributableModel
    chunks : ChunkReader                the n chunks of the corpus
    columns : (n, d) unsigned           the subsets of each chunk
    n_subsets : K
    settings : ClosedSettings
    scratch : directory, optional       where an interrupted pass continues from
    save_seconds : float                how often the pass is saved there
    workers : PassWorkers, optional     who goes over the corpus, with a `scratch` that they see; default:
                                        this process

    Returns
    -------
    Operators        gates (K, p) float32 per space; every chunk seen

    Raises
    ------
    NumericalError   a loss, gradient or Fisher matrix is not finite
    """
    # 1. The bases, shared by all subsets, from a sample; of a larger model they take longer than the pass
    kept = None if scratch is None else scratch / "steered.pt"
    if kept is not None and kept.exists():
        steered = kept_spaces(model, kept)
    else:
        steered = fit_spaces(model, chunks, settings)
        return_freed_memory()  # second moments of all layers
        if kept is not None:
            keep_spaces(steered, kept)
    # 2. One pass over the corpus: M G, and a few bytes of every chunk's own gradient
    # together, as nearly all of its time goes into the gradients themselves
    found, projections = go_over_corpus(
        steered,
        chunks,
        PassSettings(settings.batch_tokens, settings.project, settings.seed),
        design=(columns, n_subsets),
        scratch=scratch,
        save_seconds=save_seconds,
        workers=workers,
    )
    sums = found.sums
    # 3. F, of every space whose bases do not hold it
    # (of a trajectory: sums and F as at each checkpoint, by the time that the training spent there)
    fisher = _fisher(steered, chunks, settings)
    if settings.trajectory:
        _average_over_trajectory(steered, chunks, columns, settings, sums, fisher)
    # 4. A = (λ_stab F + γI)⁻¹ D⁻¹ M G, space by space; D holds the sizes of the subsets
    sizes = np.bincount(np.asarray(columns).reshape(-1), minlength=n_subsets)  # (K,) |A_k|
    gates = []
    for total, own in zip(sums, fisher, strict=True):
        # in place: sums of all subsets are the largest thing in memory
        mean = total.div_(torch.from_numpy(np.maximum(sizes, 1)).to(total.dtype)[:, None])
        # ḡ_k = (M G)_k / |A_k|; an empty subset has zeros, and no gate
        if own is None:  # whitened: F = I, and its damping is in the bases
            gates.append(mean if settings.stability == 1 else mean.div_(settings.stability))
            continue
        # drawn labels give one row a chunk: F has no more eigenvalues than these that are not zero
        drawn = settings.curvature != "exact"
        gates.append(
            solve_gates(
                mean,
                own,
                damping=settings.damping,
                time=settings.time,
                stability=settings.stability,
                n_rows=chunks.n_chunks if drawn else None,
            )
        )
    # 5. On the CPU, where they are stored; queries move them to their device
    return_freed_memory()  # of batches
    return Operators(
        spaces=[space.cpu() for space in steered.spaces],
        gates=[gate.numpy() for gate in gates],
        layer=settings.layer,
        fit="closed",
        seen=np.ones(chunks.n_chunks, dtype=np.uint8),
        # gates that are plain means say of a single chunk what they say of a subset
        direct_scale=1.0 / settings.stability if is_whitened(settings) else None,
        averaged=steered.averaged,
        normalized=steered.normalized,
        projections=projections,
        log={"loss": np.asarray([found.mean_loss])},
    )


def is_whitened(settings: ClosedSettings) -> bool:
    """Tell whether the bases hold the Fisher matrix, so that gates are plain means of chunks' gradients."""
    return settings.curvature == "kronecker" and all(cls.whitens for cls in space_classes(settings.spaces))


def _fisher(
    steered: SteeredModel, chunks: ChunkReader, settings: ClosedSettings
) -> Sequence[torch.Tensor | None]:
    """Compute F of every space, None where the bases hold it."""
    if is_whitened(settings):
        return [None for _ in steered.spaces]
    by = label_fisher if settings.curvature == "exact" else drawn_fisher
    return by(steered, chunks, batch_tokens=settings.batch_tokens, seed=settings.seed)


def _average_over_trajectory(
    steered: SteeredModel,
    chunks: ChunkReader,
    columns: np.ndarray,
    settings: ClosedSettings,
    sums: list[torch.Tensor],
    fisher: Sequence[torch.Tensor | None],
) -> None:
    """Make M G and F means over the checkpoints of the training, in place: the bases are the final model's,
    so that a gate is the same direction in weights throughout."""
    opener = Opener.like(steered.model)
    # the final model has what the checkpoints leave of the training
    own = 1.0 - sum(share for _, share in settings.trajectory)
    totals = [total for total in (*sums, *fisher) if total is not None]
    for total in totals:
        total.mul_(own)
    # every checkpoint goes over the corpus in the same batches
    plan = chunks.plan(settings.batch_tokens)
    for path, share in settings.trajectory:
        # one at a time: a checkpoint is as large as the model
        earlier = replace(steered, model=opener.load(path))
        found = accumulate(earlier, chunks, plan, columns, len(sums[0])).sums
        for total, part in zip(totals, (*found, *_fisher(earlier, chunks, settings)), strict=True):
            assert part is not None
            total.add_(part, alpha=share)
