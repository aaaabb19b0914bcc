"""The training loss: soft-capped softmax cross entropy at the scored positions only.

Over a vocabulary of thousands the logits, not the blocks, would take most of the time and memory of a small
model. So they are made a few hundred rows at a time, and the gradient of each row block is formed while it is
in cache.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_ROWS = 256


def cross_entropy(final: Tensor, weight: Tensor, targets: Tensor, *, soft_cap: float | None = None) -> Tensor:
    """Mean cross entropy of next tokens, in nats.

        z = weight · final;   z = c · tanh(z / c) where there is a soft cap c;   loss = mean(logsumexp(z) −
        z[target])

    Matrix products run in bf16 where autocast is on for the device, everything else in fp32.

    Parameters
    ----------
    final : Tensor (N, d)
        What the output head reads, at the scored positions only.
    weight : Tensor (V, d)
        The output head, without bias.
    targets : Tensor (N,) int64

    Returns
    -------
    Tensor (), fp32; differentiable once in `final` and `weight`.
    """
    device = final.device.type
    low = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else torch.float32
    loss: Tensor = _CrossEntropy.apply(final, weight, targets, soft_cap, low)
    return loss


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, final: Tensor, weight: Tensor, targets: Tensor, cap: float | None, low: torch.dtype
    ) -> Tensor:
        n = len(targets)
        device = final.device.type
        with torch.autocast(device, enabled=False):
            rows = final.to(low)  # (N, d)
            head = weight.to(low)  # (V, d)
            wants_weight = ctx.needs_input_grad[1]
            grad_final = torch.empty_like(final, dtype=torch.float32)
            grad_weight = torch.zeros_like(weight, dtype=torch.float32) if wants_weight else None
            total = torch.zeros((), dtype=torch.float64, device=final.device)
            for start in range(0, n, _ROWS):
                block, wanted = rows[start : start + _ROWS], targets[start : start + _ROWS, None]
                z = (block @ head.T).float()  # (R, V)
                slope = None
                if cap is not None:
                    z = z.div_(cap).tanh_()
                    slope = (z * z).neg_().add_(1.0)  # derivative of the cap
                    z.mul_(cap)
                hit = z.gather(1, wanted)
                highest = z.amax(1, keepdim=True)
                z.sub_(highest).exp_()
                norm = z.sum(1, keepdim=True)
                total += (norm.log() + highest - hit).double().sum()
                z.div_(norm)  # softmax
                z.scatter_add_(1, wanted, torch.full_like(wanted, -1, dtype=z.dtype))
                if slope is not None:
                    z.mul_(slope)
                gradient = z.to(low)
                grad_final[start : start + _ROWS] = gradient @ head
                if grad_weight is not None:
                    grad_weight += gradient.T @ block
        scale = 1.0 / max(n, 1)
        ctx.final_dtype, ctx.weight_dtype = final.dtype, weight.dtype
        ctx.save_for_backward(
            grad_final.mul_(scale), None if grad_weight is None else grad_weight.mul_(scale)
        )
        return (total * scale).float()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:
        grad_final, grad_weight = ctx.saved_tensors
        if grad_weight is not None:
            grad_weight = (grad_weight * upstream).to(ctx.weight_dtype)
        return (grad_final * upstream).to(ctx.final_dtype), grad_weight, None, None, None


def next_token_loss(model: Any, batch: Any) -> Tensor:
    """Mean cross entropy of a batch's scored tokens under any causal language model, differentiable.

    Parameters
    ----------
    model : PreTrainedModel
    batch : Batch
        Right-padded ids, the positions that predict scored tokens, and those tokens.
    """
    head = model.get_output_embeddings()
    final = _before_head(model, head, batch.ids).flatten(0, 1).index_select(0, batch.rows)  # (N, d)
    config = model.config.get_text_config()
    cap = getattr(config, "final_logit_softcapping", None)
    scaled = any(getattr(config, name, None) is not None for name in ("logits_scaling", "logit_scale"))
    if isinstance(head, torch.nn.Linear) and head.bias is None and not scaled:
        return cross_entropy(final, head.weight, batch.targets, soft_cap=cap)
    return torch.nn.functional.cross_entropy(head_logits(model, final).float(), batch.targets)


def logit_cap(model: Any) -> float | None:
    """Where the model's logits are capped softly (NanoChat, Gemma 2), or None."""
    cap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    return None if cap is None else float(cap)


def head_logits(model: Any, final: Tensor) -> Tensor:
    """Logits from what the output head reads, with the model's own scaling (Granite, Cohere) and soft cap."""
    return soft_cap(model, uncapped_logits(model, final))


def soft_cap(model: Any, logits: Tensor) -> Tensor:
    """Logits softly capped, where the model does so."""
    cap = logit_cap(model)
    return logits if cap is None else torch.tanh(logits / cap) * cap


def uncapped_logits(model: Any, final: Tensor) -> Tensor:
    """Logits with the model's own scaling (Granite, Cohere), before its soft cap."""
    config = model.config.get_text_config()
    logits: Tensor = model.get_output_embeddings()(final)
    if (divisor := getattr(config, "logits_scaling", None)) is not None:
        logits = logits / divisor
    if (factor := getattr(config, "logit_scale", None)) is not None:
        logits = logits * factor
    return logits


class _Stop(Exception):
    pass


def _before_head(model: Any, head: torch.nn.Module, ids: Tensor) -> Tensor:
    """What the head would read, without computing logits at every position."""
    caught: list[Tensor] = []

    def stop(module: torch.nn.Module, args: tuple[Tensor, ...]) -> None:
        caught.append(args[0])
        raise _Stop

    handle = head.register_forward_pre_hook(stop)
    try:
        model(input_ids=ids, use_cache=False)
    except _Stop:
        pass
    finally:
        handle.remove()
    return caught[0]
