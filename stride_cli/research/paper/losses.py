"""The three losses of the published recipe (paper, §3.1 and app:ablations)."""

from __future__ import annotations

import torch


def fidelity_loss(losses: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of each row over its scored tokens (paper, L_fid; mean instead of sum over tokens).

    Parameters
    ----------
    losses : (B, T) float32       cross-entropy of each token, nats
    weights : (B, T) float32      ω

    Returns
    -------
    Tensor (B,)      mean nats per scored token
    """
    return (losses * weights).sum(dim=1) / weights.sum(dim=1).clamp_min(1)


def stability_loss(
    variant: str, base: torch.Tensor | None, steered: torch.Tensor, shift: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Penalise moves of predictions that steering should leave alone, per row (paper, app:ablations).

    Parameters
    ----------
    variant : str
        ``"kl"``: KL(base ∥ steered) over the base model's m highest tokens, renormalised (paper, L_stab-KL);
        ``"logit"``: squared change of those logits; ``"norm"``: squared norm of the injected shift.
    base, steered : (B, T, m) float32 logits of the base model's m highest tokens; not read by ``"norm"``
    shift : (B, T, ·)          what was added, in the residual stream or to the logits
    weights : (B, T)           positions that count

    Returns
    -------
    Tensor (B,)      mean over the positions that count
    """
    if variant == "norm":
        positions = shift.float().square().sum(dim=-1)
    else:
        assert base is not None
        if variant == "logit":
            positions = (steered - base).square().sum(dim=-1)
        else:
            log_base, log_steered = base.log_softmax(-1), steered.log_softmax(-1)
            positions = (log_base.exp() * (log_base - log_steered)).sum(dim=-1)
    return (positions * weights).sum(dim=1) / weights.sum(dim=1).clamp_min(1)


def linearity_residual(sketch: torch.Tensor, *, ridge: float = 1e-2) -> torch.Tensor:
    """Compute Q with ``L_LDS(y) = ‖Q y‖²``: the residual of a ridge fit in the sketched design.

    Parameters
    ----------
    sketch : (k, q) float64      rows of M̃ = M R
    ridge : float                γ

    Returns
    -------
    Tensor (k, k) float64        ``I − M̃ (M̃ᵀM̃ + γI)⁻¹ M̃ᵀ``
    """
    size = sketch.shape[1]
    system = sketch.T @ sketch + ridge * torch.eye(size, dtype=sketch.dtype)
    return torch.eye(len(sketch), dtype=sketch.dtype) - sketch @ torch.linalg.solve(system, sketch.T)
