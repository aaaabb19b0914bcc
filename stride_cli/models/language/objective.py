"""The training loss: soft-capped softmax cross entropy at the scored positions only.

The logits of a small model would take most of its time and memory. They are made a few hundred rows at a
time, and the gradient of each row block is formed while it is in cache.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stride_cli.models.language.structure import stopped_at

_ROWS = 256


def cross_entropy(final: Tensor, weight: Tensor, targets: Tensor, *, soft_cap: float | None = None) -> Tensor:
    """Mean cross entropy of next tokens, (), fp32 nats; differentiable once in `final` and `weight`.

    z = weight · final, or c tanh(z / c) of it where there is a soft cap c; loss = mean(logsumexp(z) −
    z[target]) over final (N, d), what the head reads at scored positions, weight (V, d) of a head without
    bias, and targets (N,) int64. Products run in bf16 where autocast is on for the device, everything else in
    fp32.
    """
    device = final.device.type
    low = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else torch.float32
    loss: Tensor = _MeanLoss.apply(final, weight, targets, soft_cap, low)
    return loss


def token_losses(final: Tensor, weight: Tensor, targets: Tensor, *, soft_cap: float | None = None) -> Tensor:
    """`cross_entropy` of each row, (N,) fp32, with the output head frozen: differentiable once in `final`."""
    losses: Tensor = _TokenLosses.apply(final, weight, targets, soft_cap)
    return losses


def plain_head(model: Any) -> Tensor | None:
    """The output head's weight (V, d) where logits are its product alone (and a soft cap), else None."""
    head, config = model.get_output_embeddings(), model.config.get_text_config()
    scaled = any(getattr(config, name, None) is not None for name in ("logits_scaling", "logit_scale"))
    plain = type(head) is torch.nn.Linear and head.bias is None and not scaled
    return head.weight if plain else None


def _losses_and_gradients(
    final: Tensor,
    weight: Tensor,
    targets: Tensor,
    cap: float | None,
    low: torch.dtype,
    *,
    wants_final: bool,
    wants_weight: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Loss of each row (N,), its gradient (N, d), and the gradient (V, d) of their sum in the head; fp32."""
    with torch.autocast(final.device.type, enabled=False):
        rows = final.to(low)  # (N, d)
        head = weight.to(low)  # (V, d)
        losses = torch.empty(len(targets), dtype=torch.float32, device=final.device)
        grad_final = torch.empty_like(final, dtype=torch.float32) if wants_final else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if wants_weight else None
        for start in range(0, len(targets), _ROWS):
            block, wanted = rows[start : start + _ROWS], targets[start : start + _ROWS, None]
            z = (block @ head.T).float()  # (R, V)
            slope = None
            if cap is not None:
                z = z.div_(cap).tanh_()
                if wants_final or wants_weight:
                    slope = (z * z).neg_().add_(1.0)  # derivative of the cap
                z.mul_(cap)
            hit = z.gather(1, wanted)
            highest = z.amax(1, keepdim=True)
            z.sub_(highest).exp_()
            norm = z.sum(1, keepdim=True)
            losses[start : start + _ROWS] = (norm.log() + highest - hit)[:, 0]
            if not (wants_final or wants_weight):
                continue
            z.div_(norm)  # softmax
            z.scatter_add_(1, wanted, torch.full_like(wanted, -1, dtype=z.dtype))
            if slope is not None:
                z.mul_(slope)
            gradient = z.to(low)
            if grad_final is not None:
                grad_final[start : start + _ROWS] = gradient @ head
            if grad_weight is not None:
                grad_weight += gradient.T @ block
    return losses, grad_final, grad_weight


class _MeanLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, final: Tensor, weight: Tensor, targets: Tensor, cap: float | None, low: torch.dtype
    ) -> Tensor:
        losses, of_final, of_weight = _losses_and_gradients(
            final, weight, targets, cap, low, wants_final=True, wants_weight=ctx.needs_input_grad[1]
        )
        scale = 1.0 / max(len(targets), 1)
        ctx.dtypes = final.dtype, weight.dtype
        ctx.save_for_backward(*(None if each is None else each.mul_(scale) for each in (of_final, of_weight)))
        return (losses.double().sum() * scale).float()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        found = (
            None if each is None else (each * upstream).to(dtype)
            for each, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        )
        return (*found, None, None, None)


class _TokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, final: Tensor, weight: Tensor, targets: Tensor, cap: float | None) -> Tensor:
        wanted = ctx.needs_input_grad[0]
        losses, gradient, _ = _losses_and_gradients(
            final, weight, targets, cap, final.dtype, wants_final=wanted, wants_weight=False
        )
        ctx.final_dtype = final.dtype
        ctx.save_for_backward(gradient)
        return losses

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return (gradient * upstream[:, None]).to(ctx.final_dtype), None, None, None


def next_token_loss(model: Any, batch: Any) -> Tensor:
    """Mean cross entropy of a batch's scored tokens under any causal language model, differentiable.

    `batch`: right-padded ids, the positions that predict scored tokens, and those tokens.
    """
    head = model.get_output_embeddings()
    final = before_head(model, head, batch.ids).flatten(0, 1).index_select(0, batch.rows)  # (N, d)
    if (weight := plain_head(model)) is not None:
        return cross_entropy(final, weight, batch.targets, soft_cap=logit_cap(model))
    return torch.nn.functional.cross_entropy(head_logits(model, final).float(), batch.targets)


def logit_cap(model: Any) -> float | None:
    """The bound of the model's soft cap on logits (NanoChat, Gemma 2), or None."""
    cap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    return None if cap is None else float(cap)


def head_logits(model: Any, final: Tensor) -> Tensor:
    """Logits from what the output head reads, with the model's own scaling (Granite, Cohere) and soft cap."""
    return soft_cap(model, uncapped_logits(model, final))


def soft_cap(model: Any, logits: Tensor) -> Tensor:
    """Logits softly capped, where the model does so."""
    cap = logit_cap(model)
    return logits if cap is None else torch.tanh(logits / cap) * cap


def uncapped_logits(model: Any, final: Tensor, tokens: Tensor | None = None) -> Tensor:
    """Logits with the model's own scaling (Granite, Cohere), before its soft cap; or of `tokens` (…, m)."""
    config = model.config.get_text_config()
    head = model.get_output_embeddings()
    logits: Tensor
    if tokens is None:
        logits = head(final)
    elif type(head) is torch.nn.Linear:
        # m rows of the head for each position, instead of all V for all
        logits = (head.weight[tokens] @ final.unsqueeze(-1)).squeeze(-1)
        logits = logits if head.bias is None else logits + head.bias[tokens]
    else:
        logits = head(final).gather(-1, tokens)
    if (divisor := getattr(config, "logits_scaling", None)) is not None:
        logits = logits / divisor
    if (factor := getattr(config, "logit_scale", None)) is not None:
        logits = logits * factor
    return logits


def before_head(model: Any, head: torch.nn.Module, ids: Tensor) -> Tensor:
    """Run the model up to its head, without logits at every position."""
    return stopped_at(head, lambda: model(input_ids=ids, use_cache=False))
