"""Many small NanoChat models trained side by side: what `stride_cli.models.training.train` does to each.

Small models on a CPU spend little of their time in matrix products: most goes into calls, temporary memory
and elementwise passes. So forward and backward pass are written out here for this one architecture, with
everything that can be fused fused: one product for queries, keys and values; softmax instead of flash
attention (whose backward pass is slow on CPUs for short sequences); a cross entropy of ten passes over the
logits. Activations of one model at a time stay in cache; parameters and optimizer states are stacked, so that
Muon's Newton–Schulz iterations and AdamW run once for all models.

Each model sees exactly the batches, passes and rates that `train` would give it; results agree to rounding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stride_cli.errors import NumericalError
from stride_cli.models.batches import Batch, make_batch
from stride_cli.models.recipe import Architecture, Recipe
from stride_cli.models.training import initial_model, planned_steps

_ROWS = 256  # of logits at once: they stay in cache
_BETAS = (0.9, 0.95)  # of AdamW, as in `train`
_ADAM_EPS = 1e-8
_MOMENTUM = 0.95  # of Muon
_NS = (3.4445, -4.7750, 2.0315)  # torch.optim.Muon's coefficients, steps and floor
_NS_STEPS = 5
_NS_EPS = 1e-7
_LAYER = {"attention": ("q_proj", "k_proj", "v_proj", "o_proj"), "up": ("fc1",), "down": ("fc2",)}


def can_stack(recipe: Recipe, device: str) -> bool:
    """Whether `train_stacked` knows this recipe: a NanoChat trained from scratch, on a CPU."""
    return recipe.kind == "train" and recipe.architecture is not None and device == "cpu"


@torch.no_grad()
def train_stacked(
    chunks: Sequence[Any], recipe: Recipe, masks: Sequence[np.ndarray], seeds: Sequence[int]
) -> list[Any]:
    """Train one model per mask and seed.

    Parameters
    ----------
    chunks : sequence of Chunk        all n
    recipe : Recipe                   one that `can_stack`
    masks : sequence of (n,) bool     model m is trained on these chunks
    seeds : sequence of int           of its initial weights and order

    Returns
    -------
    list of NanoChatForCausalLM, in eval mode, in order

    Raises
    ------
    CorpusError         a subset has no scored token
    NumericalError      a loss is not finite
    """
    assert recipe.architecture is not None
    recipes = [recipe.with_seed(seed) for seed in seeds]
    plans = [planned_steps(chunks, r, subset=mask) for r, mask in zip(recipes, masks, strict=True)]
    models = [initial_model(r) for r in recipes]
    # longest first: those that are still training are always the first rows of every stack
    order = sorted(range(len(models)), key=lambda m: -plans[m][0])
    stack = _Stack(recipe, [models[m] for m in order])
    totals = [plans[m][0] for m in order]
    steps: list[Iterator[tuple[np.ndarray, float]]] = [plans[m][1] for m in order]
    step = _Step(recipe)
    for number in range(totals[0]):
        active = sum(total > number for total in totals)
        rates = []
        for place in range(active):
            batch, rate = next(steps[place])
            rates.append(rate)
            loss = step.run(stack, place, make_batch([chunks[i] for i in batch], torch.device("cpu")))
            if not math.isfinite(loss):
                raise NumericalError(
                    f"the training loss is {loss} at step {number + 1} of {totals[place]}",
                    fix="train the base model with a lower --lr, and build the index again",
                )
        stack.update(torch.tensor(rates), number + 1)
    for place, m in enumerate(order):
        stack.write_back(place, models[m].eval())
    return models


class _Stack:
    """Parameters, gradients and optimizer states of M models, one tensor each: attention (M, L, 4, d, d) as
    q, k, v, o; up (M, L, 4d, d); down (M, L, d, 4d); embedding and head (M, V, d)."""

    def __init__(self, recipe: Recipe, models: Sequence[Any]) -> None:
        self.recipe = recipe
        rows = [_parameters(model) for model in models]
        self.values = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        self.gradients = {name: torch.zeros_like(value) for name, value in self.values.items()}
        muon = recipe.optimizer == "muon+adamw"
        self.muon = ("attention", "up", "down") if muon else ()
        self.adam = tuple(name for name in self.values if name not in self.muon)
        self.first = {name: torch.zeros_like(value) for name, value in self.values.items()}
        self.second = {name: torch.zeros_like(self.values[name]) for name in self.adam}

    def update(self, rates: Tensor, number: int) -> None:
        """One step of the optimizers on the first len(rates) models; gradients are zero afterwards."""
        if self.muon:
            self._update_muon(rates * self.recipe.lr)
        self._update_adam(rates * self.recipe.adam_lr, number)
        for gradient in self.gradients.values():
            gradient[: len(rates)].zero_()

    def _update_muon(self, rates: Tensor) -> None:
        active = len(rates)
        directions = {}
        for name in self.muon:
            gradient, momentum = self.gradients[name][:active], self.first[name][:active]
            momentum.lerp_(gradient, 1 - _MOMENTUM)
            directions[name] = gradient.lerp(momentum, _MOMENTUM).bfloat16()
        # model by model: the same products in the same order, whatever it is trained beside
        for place in range(active):
            square = directions["attention"][place]
            square.copy_(_orthogonal(square.flatten(0, 1)).view_as(square))
            # the up matrices lie across: their transposes go together with the down matrices
            up, down = directions["up"][place], directions["down"][place]
            flat = _orthogonal(torch.cat([up.transpose(1, 2), down]))
            up.copy_(flat[: len(up)].transpose(1, 2))
            down.copy_(flat[len(up) :])
        for name, direction in directions.items():
            value = self.values[name][:active]
            ratio = math.sqrt(max(1.0, value.shape[-2] / value.shape[-1]))
            by_model = _expand(rates, value)
            if self.recipe.weight_decay:
                value.mul_(1 - by_model * self.recipe.weight_decay)
            value.addcmul_(direction.float(), by_model * -ratio)

    def _update_adam(self, rates: Tensor, number: int) -> None:
        active = len(rates)
        gradients = {name: self.gradients[name][:active] for name in self.adam}
        if self.recipe.clip:
            squares = sum(g.flatten(1).norm(dim=1).square() for g in gradients.values())
            factor = (self.recipe.clip / (torch.as_tensor(squares).sqrt() + 1e-6)).clamp_max(1.0)
            for gradient in gradients.values():
                gradient.mul_(_expand(factor, gradient))
        bias_first, bias_second = 1 - _BETAS[0] ** number, 1 - _BETAS[1] ** number
        for name, gradient in gradients.items():
            value, first, second = (t[name][:active] for t in (self.values, self.first, self.second))
            by_model = _expand(rates, value)
            if self.recipe.optimizer == "adamw" and self.recipe.weight_decay and name in _LAYER:
                value.mul_(1 - by_model * self.recipe.weight_decay)
            first.lerp_(gradient, 1 - _BETAS[0])
            second.mul_(_BETAS[1]).addcmul_(gradient, gradient, value=1 - _BETAS[1])
            scale = second.sqrt().div_(math.sqrt(bias_second)).add_(_ADAM_EPS)
            value.addcmul_(torch.div(first, scale, out=scale), by_model * (-1 / bias_first))

    def write_back(self, place: int, model: Any) -> None:
        """Put the weights of row `place` into a model."""
        model.model.embed_tokens.weight.copy_(self.values["embedding"][place])
        model.lm_head.weight.copy_(self.values["head"][place])
        for number, layer in enumerate(model.model.layers):
            for name, matrices in _layer_matrices(layer).items():
                found = self.values[name][place, number]
                for matrix, value in zip(matrices, found if name == "attention" else [found], strict=True):
                    matrix.copy_(value)


def _parameters(model: Any) -> dict[str, Tensor]:
    layers = [_layer_matrices(layer) for layer in model.model.layers]
    return {
        "attention": torch.stack([torch.stack(layer["attention"]) for layer in layers]),
        "up": torch.stack([layer["up"][0] for layer in layers]),
        "down": torch.stack([layer["down"][0] for layer in layers]),
        "embedding": model.model.embed_tokens.weight.detach().clone(),
        "head": model.lm_head.weight.detach().clone(),
    }


def _layer_matrices(layer: Any) -> dict[str, list[Tensor]]:
    return {
        name: [
            getattr(layer.self_attn if name == "attention" else layer.mlp, p).weight.detach() for p in parts
        ]
        for name, parts in _LAYER.items()
    }


def _expand(values: Tensor, like: Tensor) -> Tensor:
    return values.view(-1, *[1] * (like.ndim - 1))


def _orthogonal(matrices: Tensor) -> Tensor:
    """Newton–Schulz of a stack (S, a, b), a ≤ b, bf16: as torch.optim.Muon does to each matrix."""
    a, b, c = _NS
    x = matrices / matrices.flatten(1).norm(dim=1).clamp(min=_NS_EPS)[:, None, None]
    for _ in range(_NS_STEPS):
        gram = torch.bmm(x, x.transpose(1, 2))
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


@dataclass
class _Saved:
    """What a layer's backward pass reads."""

    attention_in: Tensor  # (N, d) normed, fp32
    attention_inv: Tensor  # (N, 1)
    turned: Tensor  # (B, T, 2, H, h) queries and keys after rotation and norm, fp32
    turned_inv: Tensor
    qk: Tensor  # (2, B·H, T, h), low precision, as v
    v: Tensor
    shares: Tensor  # (B·H, T, T)
    mixed: Tensor  # (N, d)
    mlp_in: Tensor
    mlp_inv: Tensor
    active: Tensor  # (N, 4d) relu, low precision
    square: Tensor


class _Step:
    """Loss and gradients of one model on one batch."""

    def __init__(self, recipe: Recipe) -> None:
        from transformers import NanoChatConfig

        assert recipe.architecture is not None
        self.size: Architecture = recipe.architecture
        self.low = torch.bfloat16 if recipe.dtype == "bf16" else torch.float32
        config = NanoChatConfig()
        self.eps = config.rms_norm_eps
        self.cap = float(config.final_logit_softcapping)
        half = self.size.width // self.size.heads // 2
        base = config.rope_parameters["rope_theta"]
        frequency = 1.0 / (base ** (torch.arange(0, 2 * half, 2, dtype=torch.float) / (2 * half)))
        angles = torch.arange(self.size.context)[:, None].float() * frequency  # (T, h/2)
        self.cos, self.sin = angles.cos()[:, None, None], angles.sin()[:, None, None]
        self.masks: dict[int, Tensor] = {}

    def run(self, stack: _Stack, place: int, batch: Batch) -> float:
        """Add the gradient of the batch's mean loss to row `place` of the stack; returns that loss."""
        values = {name: value[place] for name, value in stack.values.items()}
        gradients = {name: value[place] for name, value in stack.gradients.items()}
        shape = batch.ids.shape
        ids = batch.ids.flatten()
        weights = {name: values[name].to(self.low) for name in ("attention", "up", "down")}
        start, start_inv = self._norm(values["embedding"][ids])
        x = start.clone()
        saved = []
        for layer in range(self.size.layers):
            matrices = weights["attention"][layer], weights["up"][layer], weights["down"][layer]
            saved.append(self._forward(x, shape, matrices))
        final, final_inv = self._norm(x)
        loss, slope = self._loss(
            final.index_select(0, batch.rows), values["head"], batch.targets, gradients["head"]
        )
        upstream = torch.zeros_like(final).index_copy_(0, batch.rows, slope)
        dx = self._norm_back(upstream, final, final_inv)
        for layer in reversed(range(self.size.layers)):
            matrices = weights["attention"][layer], weights["up"][layer], weights["down"][layer]
            slopes = tuple(gradients[name][layer] for name in ("attention", "up", "down"))
            self._backward(dx, shape, matrices, slopes, saved.pop())
        gradients["embedding"].index_add_(0, ids, self._norm_back(dx, start, start_inv))
        return loss

    def _norm(self, x: Tensor) -> tuple[Tensor, Tensor]:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        inverse = length.square_().div_(x.shape[-1]).add_(self.eps).rsqrt_()
        return x * inverse, inverse

    @staticmethod
    def _norm_back(upstream: Tensor, normed: Tensor, inverse: Tensor) -> Tensor:
        mean = (upstream * normed).mean(-1, keepdim=True)
        return torch.addcmul(upstream, normed, mean, value=-1).mul_(inverse)

    def _forward(self, x: Tensor, shape: torch.Size, weights: tuple[Tensor, Tensor, Tensor]) -> _Saved:
        """One block: adds to the residual stream `x` (N, d) in place."""
        (n_batch, length), heads, width = shape, self.size.heads, self.size.width
        attention, up, down = weights
        h = width // heads
        attention_in, attention_inv = self._norm(x)
        qkv = attention_in.to(self.low) @ attention[:3].flatten(0, 1).T  # (N, 3d)
        split = qkv.view(n_batch, length, 3, heads, h)
        turned, turned_inv = self._norm(
            _rotate(split[:, :, :2].float(), self.cos[:length], self.sin[:length])
        )
        qk = _heads_first(turned.to(self.low))  # (2, B·H, T, h)
        v = _heads_first(split[:, :, 2:])[0]
        scores = torch.baddbmm(self._mask(length), qk[0], qk[1].transpose(1, 2), alpha=h**-0.5)
        shares = torch.softmax(scores, -1)
        mixed = torch.bmm(shares, v).view(n_batch, heads, length, h).transpose(1, 2).reshape(-1, width)
        x.add_(mixed @ attention[3].T)
        mlp_in, mlp_inv = self._norm(x)
        active = (mlp_in.to(self.low) @ up.T).relu_()
        square = active * active
        x.add_(square @ down.T)
        return _Saved(
            attention_in, attention_inv, turned, turned_inv, qk, v, shares, mixed, mlp_in, mlp_inv, active,
            square,
        )  # fmt: skip

    def _backward(
        self,
        dx: Tensor,
        shape: torch.Size,
        weights: tuple[Tensor, Tensor, Tensor],
        gradients: tuple[Tensor, ...],
        saved: _Saved,
    ) -> None:
        """Turns the slope `dx` (N, d) behind a block into the one before it, in place."""
        (n_batch, length), heads, width = shape, self.size.heads, self.size.width
        attention, up, down = weights
        h = width // heads
        low = dx.to(self.low)
        gradients[2].copy_(low.T @ saved.square)
        inner = ((low + low) @ down).mul_(saved.active)  # d relu(z)² = 2 relu(z) dz
        gradients[1].copy_(inner.T @ saved.mlp_in.to(self.low))
        dx.add_(self._norm_back((inner @ up).float(), saved.mlp_in, saved.mlp_inv))
        low = dx.to(self.low)
        gradients[0][3].copy_(low.T @ saved.mixed)
        mixed = _heads_first((low @ attention[3]).view(n_batch, length, 1, heads, h))[0]
        shares = torch.bmm(mixed, saved.v.transpose(1, 2))
        scores = torch.ops.aten._softmax_backward_data(shares, saved.shares, -1, self.low)
        dqk = torch.stack(
            [torch.bmm(scores, saved.qk[1]), torch.bmm(scores.transpose(1, 2), saved.qk[0])]
        )  # (2, B·H, T, h)
        by_token = dqk.view(2, n_batch, heads, length, h).permute(1, 3, 0, 2, 4)
        turned = self._norm_back(by_token.float().mul_(h**-0.5), saved.turned, saved.turned_inv)
        dqkv = torch.empty(n_batch, length, 3, heads, h, dtype=self.low)
        dqkv[:, :, :2] = _rotate(turned, self.cos[:length], -self.sin[:length])
        dv = torch.bmm(saved.shares.transpose(1, 2), mixed)
        dqkv[:, :, 2] = dv.view(n_batch, heads, length, h).transpose(1, 2)
        flat = dqkv.view(-1, 3 * width)
        gradients[0][:3].view(3 * width, width).copy_(flat.T @ saved.attention_in.to(self.low))
        inward = flat @ attention[:3].flatten(0, 1)
        dx.add_(self._norm_back(inward.float(), saved.attention_in, saved.attention_inv))

    def _mask(self, length: int) -> Tensor:
        if length not in self.masks:
            above = torch.full((length, length), -math.inf, dtype=self.low).triu_(1)
            self.masks[length] = above
        return self.masks[length]

    def _loss(self, final: Tensor, head: Tensor, targets: Tensor, gradient: Tensor) -> tuple[float, Tensor]:
        """Mean cross entropy under the soft cap, and its slope in `final` (N, d); adds to `gradient` (V, d).

        Logits lie between ± cap, so their exponentials need no shift.
        """
        n = len(targets)
        rows, weight = final.to(self.low), head.to(self.low)
        slope = torch.empty_like(final)
        total = torch.zeros((), dtype=torch.float64)
        for first in range(0, n, _ROWS):
            block, wanted = rows[first : first + _ROWS], targets[first : first + _ROWS, None]
            z = (block @ weight.T).float().div_(self.cap).tanh_()  # (R, V)
            p = (z * self.cap).exp_()
            norm = p.sum(1, keepdim=True)
            hit = z.gather(1, wanted)
            total += (norm.log() - hit * self.cap).double().sum()
            z.mul_(z)
            p.addcmul_(p, z, value=-1).div_(norm.mul_(n))  # softmax × derivative of the cap / N
            p.scatter_add_(1, wanted, hit.square_().sub_(1).div_(n))
            low = p.to(self.low)
            slope[first : first + _ROWS] = low @ weight
            gradient += low.T @ block
        return float(total / n), slope


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """NanoChat's rotary embedding of x (B, T, 2, H, h), fp32; with −sin, its inverse."""
    left, right = x.chunk(2, -1)
    out = torch.empty_like(x)
    torch.mul(left, cos, out=out[..., : left.shape[-1]]).addcmul_(right, sin)
    torch.mul(right, cos, out=out[..., left.shape[-1] :]).addcmul_(left, sin, value=-1)
    return out


def _heads_first(x: Tensor) -> Tensor:
    """(B, T, C, H, h) as (C, B·H, T, h), contiguous."""
    n_batch, length, count, heads, h = x.shape
    return x.permute(2, 0, 3, 1, 4).contiguous().view(count, n_batch * heads, length, h)
